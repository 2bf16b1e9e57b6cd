"""What functions of single examples ask of a matrix whose examples are spread over processes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from curvlab.curvature.data_operator import DataOperator
from curvlab.linalg import LinearOperator

Value = TypeVar("Value")


class SpreadOperator(LinearOperator):
    """A mean over examples of which each process holds some; vectors are whole (`DataParallelOperator`).

    Examples are numbered through the processes in their order. Traces, importance, rows and Kronecker factors are
    computed by each process from its own examples and put together; all methods but `own_places` may exchange
    numbers, so that every process calls them, in the same order.
    """

    @abstractmethod
    def own(self) -> DataOperator:
        """Return the sum over this process's examples, divided by what the mean over all divides by."""

    @abstractmethod
    def own_places(self, chosen: Tensor) -> Tensor:
        """Return those of the examples `chosen` that this process holds, in its own numbering."""

    @abstractmethod
    def gather(self, value: Value) -> list[Value]:
        """Return what each process has, in their order: small things, tensors on the CPU."""

    @abstractmethod
    def sum_of_all(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes, the same bits on each; `tensor` may be overwritten."""

    @abstractmethod
    def own_generator(self, generator: torch.Generator | None) -> torch.Generator:
        """Return a generator for draws at this process's own examples, from one that is seeded alike on all.

        Draws for different examples must be independent, so each process has a stream of its own: an estimate
        then depends on how many there are, within its error.
        """

    def of_all_examples(self, own: Tensor) -> Tensor:
        """Return one number for each example of all processes, (N,), from those of `own()`.

        They are terms N_r/n s_i of N_r examples, whose mean is this process's part; of N/n s_i the mean is whole.
        """
        shares = self.gather(own)
        num_examples = sum(map(len, shares))
        return torch.cat([share * (num_examples / len(share)) for share in shares])
