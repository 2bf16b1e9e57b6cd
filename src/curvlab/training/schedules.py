"""What changes along a training: learning rates, and which examples each step sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.seeding import generator_of

# ------------------------------------------------------------------------------- learning rates
Schedule: TypeAlias = Callable[[int, int], float]  # (step from 0, number of steps) -> factor of lr
ScheduleName: TypeAlias = Literal["constant", "cosine"]


def cosine(step: int, num_steps: int) -> float:
    """Return ½ (1 + cos(π step / num_steps)): from 1 towards 0."""
    return 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def cosine_after_warmup(warmup_steps: int) -> Schedule:
    """Return a schedule that rises linearly to 1 over `warmup_steps`, then falls to 0 along a cosine."""
    whole("warmup_steps", warmup_steps, least=0)

    def factor(step: int, num_steps: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return cosine(step - warmup_steps, num_steps - warmup_steps)

    return factor


def named_schedule(schedule: ScheduleName | Schedule) -> Schedule | None:
    """Return a schedule by name, or the function that was passed; None leaves the optimizer's rates alone."""
    if callable(schedule) and not isinstance(schedule, type):
        return schedule
    if schedule not in ("constant", "cosine"):
        raise ValueError(
            f"unknown schedule '{schedule}': choose constant or cosine, or pass a function of (step, number of "
            "steps)"
        )
    return cosine if schedule == "cosine" else None


# --------------------------------------------------------------------------------------- batches
class BatchOrder:
    """Batches of indices, epoch by epoch.

    Attributes:
        num_examples: N.
        batch_size: of those that are drawn.
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
        self.num_examples, self.batch_size = whole("num_examples", num_examples), whole("batch_size", batch_size)
        num_epochs, num_steps = (
            None if number is None else whole(name, number)
            for name, number in (("num_epochs", num_epochs), ("num_steps", num_steps))
        )
        if given is not None and not isinstance(given, Iterable):
            raise TypeError(f"batches are tensors of indices, one a step, got {given!r}")
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
        permutation = torch.randperm(self.num_examples, generator=generator, device=generator.device).cpu()
        return list(permutation.split(self.batch_size))[: self.num_steps - start]

    def _check(self, given: list[Tensor], num_epochs: int | None, num_steps: int | None) -> int:
        if not given or (num_steps is not None and num_steps != len(given)):
            raise ValueError(f"there are {len(given)} batches for num_steps={num_steps}: they must agree")
        if num_epochs is not None and len(given) % num_epochs:
            raise ValueError(
                f"{len(given)} batches cannot be split into num_epochs={num_epochs} equal epochs: "
                "give as many for each epoch, or pass num_steps instead"
            )
        for batch in given:
            if batch.ndim != 1 or not len(batch) or batch.min() < 0 or batch.max() >= self.num_examples:
                raise ValueError(
                    f"each batch must be a vector of indices from 0 to {self.num_examples - 1}, "
                    f"got shape {tuple(batch.shape)}"
                )
        return len(given) // num_epochs if num_epochs is not None else len(given)


def shuffled_batches(
    num_examples: int, *, batch_size: int, num_epochs: int, generator: torch.Generator | int
) -> list[Tensor]:
    """Return the batches of several epochs, each a new permutation; for runs that are to see the same ones."""
    order, generator = (
        BatchOrder(num_examples, batch_size=batch_size, num_epochs=num_epochs),
        generator_of(generator),
    )
    return [batch for epoch in range(num_epochs) for batch in order.epoch(epoch, generator)]
