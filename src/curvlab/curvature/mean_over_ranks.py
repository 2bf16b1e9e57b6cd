"""What functions of single examples ask of a matrix whose examples are spread over processes."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from curvlab.curvature.operator import DataOperator
from curvlab.linalg import LinearOperator
from curvlab.ranks import SAME_SEEDS


class MeanOverRanks(LinearOperator):
    """A mean over examples of which each of `ranks` holds some; vectors are whole (`DataParallelOperator`).

    Examples are numbered through the ranks in their order. Traces, importance, rows and Kronecker factors are
    computed by each rank from its own examples and put together; all methods but `own_places` may exchange
    numbers, so that every rank calls them, in the same order.
    """

    @property
    def is_whole(self) -> bool:
        """Whether this is the mean over all examples, each once: no sample of them, nor one with weights."""
        return True

    @abstractmethod
    def own(self) -> DataOperator:
        """Return the sum over this rank's examples, divided by what the mean over all divides by."""

    @abstractmethod
    def own_places(self, chosen: Tensor) -> Tensor:
        """Return those of the examples `chosen` that this rank holds, in its own numbering."""

    def own_generator(self, generator: torch.Generator | None) -> torch.Generator:
        """Return a generator for draws at this rank's own examples, from one that is seeded alike on all.

        Draws for different examples must be independent, so each rank has a stream of its own, seeded by the next
        number of the common one: an estimate then depends on how many ranks there are, within its error.
        """
        source = torch.Generator().manual_seed(0) if generator is None else generator
        seed = torch.randint(2**31, (1,), generator=source, device=source.device).cpu()
        self.ranks.agree(seed, SAME_SEEDS)
        return torch.Generator(source.device).manual_seed(int(seed) + self.ranks.rank)

    def of_all_examples(self, own: Tensor) -> Tensor:
        """Return one number for each example of all ranks, (N,), from those of `own()`.

        They are terms N_r/n s_i of N_r examples, whose mean is this rank's part; of N/n s_i the mean is whole.
        """
        shares = self.ranks.gather(own)
        num_examples = sum(map(len, shares))
        return torch.cat([share * (num_examples / len(share)) for share in shares])
