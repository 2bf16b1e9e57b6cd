"""Examples numbered through the shares of all ranks, drawn as one process draws them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from curvlab.linalg import ExampleDraws
from curvlab.ranks import Ranks

SEEDS = "pass generators with the same seed on every rank"


class SharedExamples:
    """How many examples and predictions the ranks have, and which of those that are drawn are this rank's.

    Args:
        ranks: who has them.
        num_own: number of this rank's examples.
        count_own: number of this rank's predictions, counted when it is first needed.
        is_mean: whether the loss is a mean over predictions, rather than a sum.
    """

    def __init__(
        self, ranks: Ranks, num_own: Callable[[], int], count_own: Callable[[], float], *, is_mean: bool
    ) -> None:
        self.ranks, self.is_mean = ranks, is_mean
        self._num_own, self._count_own = num_own, count_own

    @cached_property
    def sizes(self) -> list[int]:
        """Examples of each rank."""
        return self.ranks.gather(self._num_own())

    @property
    def num(self) -> int:
        """N, examples of all ranks together."""
        return sum(self.sizes)

    @cached_property
    def divisor(self) -> float:
        """n, by which a mean divides the sum over all ranks' examples; 1 for a sum."""
        if not self.is_mean:
            return 1.0
        total = float(sum(self.ranks.gather(self._count_own())))
        if total == 0:
            raise ValueError("every target of every rank is ignored (ignore_index): the mean has no terms")
        return total

    def draw(
        self, batch_size: int, generator: torch.Generator | None, probabilities: Tensor | None
    ) -> tuple[Tensor, Tensor | None, float]:
        """Return this rank's examples of a batch drawn from all, their weights, and what to divide their sum by.

        The batch is the one that a process with the shares in the order of their ranks would draw, uniformly or by
        `probabilities` (see `ExampleDraws`), with replacement.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        factors: Tensor | None = None
        if probabilities is None:
            source = generator.device if generator is not None else torch.device("cpu")
            indices = torch.randint(self.num, (batch_size,), generator=generator, device=source).cpu()
        else:
            indices, factors = ExampleDraws(probabilities, self.num).draw(batch_size, generator)
        self.ranks.agree(indices, f"the examples that they draw: {SEEDS}")
        own, mine = self.own_places(indices)
        own_factors = None if factors is None else factors[mine]
        return own, own_factors, batch_size / self.num * self.divisor

    def own_places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of `indices` that are this rank's, numbered in its share, and which they were."""
        first = sum(self.sizes[: self.ranks.rank])
        mine = (indices >= first) & (indices < first + self.sizes[self.ranks.rank])
        return indices[mine] - first, mine
