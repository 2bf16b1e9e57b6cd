"""Examples numbered through the shares of all ranks: counted, drawn and weighted as one process does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from curvlab.linalg import ExampleDraws
from curvlab.problem import OutputLoss, Problem, output_loss
from curvlab.ranks import SAME_SEEDS, Ranks

Value = TypeVar("Value")


class ExamplesOverRanks:
    """How many examples and predictions the ranks have, and which of those that are drawn are this rank's.

    Counts are exchanged when they are first needed.

    Args:
        ranks: who has them.
        own: this rank's examples, and the loss that is summed over them.
    """

    def __init__(self, ranks: Ranks, own: Problem) -> None:
        self.ranks, self.own = ranks, own

    @cached_property
    def sizes(self) -> list[int]:
        """Examples of each rank."""
        return self.ranks.gather(self.own.num_examples)

    @property
    def num(self) -> int:
        """N, examples of all ranks together."""
        return sum(self.sizes)

    @cached_property
    def divisor(self) -> float:
        """n, by which a mean divides the sum over all ranks' examples; 1 for a sum."""
        if self.own.loss.reduction != "mean":
            return 1.0
        total = float(sum(self.ranks.gather(self.own.total_count)))
        if total == 0:
            raise ValueError("every target of every rank is ignored (ignore_index): the mean has no terms")
        return total

    @cached_property
    def normalised_loss(self) -> OutputLoss:
        """An equal loss whose class weights have mean one over all ranks' targets, see `OutputLoss.normalised`."""

        def targets() -> Iterator[Tensor]:
            for part in self.ranks.gather([own.cpu() for own in self.own.data.targets()]):
                yield from part

        return output_loss(self.own.given_loss).normalised(targets())

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
        self.ranks.agree(indices, SAME_SEEDS)
        own, mine = self.own_places(indices)
        return own, None if factors is None else factors[mine], batch_size / self.num * self.divisor

    def own_places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of `indices` that are this rank's, numbered in its share, and which they were."""
        first = sum(self.sizes[: self.ranks.rank])
        mine = (indices >= first) & (indices < first + self.sizes[self.ranks.rank])
        return indices[mine] - first, mine

    def refused_together(self, make: Callable[[], Value]) -> Value:
        """Return make(); the ValueError that it raises on one rank is raised on all: none may stop alone."""
        made: Value | None = None
        problem = ""
        try:
            made = make()
        except ValueError as error:
            problem = str(error)
        for rank, found in enumerate(self.ranks.gather(problem)):
            if found:
                raise ValueError(f"rank {rank}: {found}")
        return cast("Value", made)
