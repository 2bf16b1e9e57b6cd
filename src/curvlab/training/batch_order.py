"""Which examples each step sees: drawn from a generator, or given."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class BatchOrder:
    """Batches of indices, epoch by epoch.

    Attributes:
        num_steps: batches in all.
        num_epochs: passes, the last one may be cut short.
        steps_per_epoch: batches of a pass.
        given: the batches, where they do not come from a generator; else empty.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        batch_size: int,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        given: Iterable[Tensor] | None = None,
    ) -> None:
        self._num_examples, self._batch_size = num_examples, batch_size
        self.given = [] if given is None else [torch.as_tensor(batch).long().cpu() for batch in given]
        if given is None:
            self.steps_per_epoch = math.ceil(num_examples / batch_size)
            self.num_steps = num_steps if num_steps is not None else (num_epochs or 0) * self.steps_per_epoch
        else:
            self.num_steps = len(self.given)
            self.steps_per_epoch = self._check(self.given, num_epochs, num_steps)
        self.num_epochs = math.ceil(self.num_steps / self.steps_per_epoch)

    def epoch(self, number: int, generator: torch.Generator) -> list[Tensor]:
        """Return the batches of one pass: a new permutation of all examples, unless they are given."""
        start = number * self.steps_per_epoch
        if self.given:
            return self.given[start : start + self.steps_per_epoch]
        permutation = torch.randperm(self._num_examples, generator=generator, device=generator.device).cpu()
        return list(permutation.split(self._batch_size))[: self.num_steps - start]

    def _check(self, given: list[Tensor], num_epochs: int | None, num_steps: int | None) -> int:
        if not given or (num_steps is not None and num_steps != len(given)):
            raise ValueError(f"there are {len(given)} batches for num_steps={num_steps}: they must agree")
        if num_epochs is not None and len(given) % num_epochs:
            raise ValueError(
                f"{len(given)} batches cannot be split into num_epochs={num_epochs} equal epochs: "
                "give as many for each epoch, or pass num_steps instead"
            )
        for batch in given:
            if batch.ndim != 1 or not len(batch) or batch.min() < 0 or batch.max() >= self._num_examples:
                raise ValueError(
                    f"each batch must be a vector of indices from 0 to {self._num_examples - 1}, "
                    f"got shape {tuple(batch.shape)}"
                )
        return len(given) // num_epochs if num_epochs is not None else len(given)


def shuffled_batches(
    num_examples: int, *, batch_size: int, num_epochs: int, generator: torch.Generator
) -> list[Tensor]:
    """Return the batches of several epochs, each a new permutation; for runs that are to see the same ones."""
    order = BatchOrder(num_examples, batch_size=batch_size, num_epochs=num_epochs)
    return [batch for epoch in range(num_epochs) for batch in order.epoch(epoch, generator)]
