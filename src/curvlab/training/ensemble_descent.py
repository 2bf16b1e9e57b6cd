"""Move K copies of a model's parameters down K objectives at once, on shared batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint, described, fingerprint
from curvlab.training.batch_order import BatchOrder
from curvlab.training.loop import TrainingDivergedError
from curvlab.training.schedules import Schedule, ScheduleName, named_schedule

# (positions (K, P), indices (B,) of the batch's examples) -> losses (K,), gradients (K, P)
EnsembleGradient: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EnsembleOptimizer: TypeAlias = Literal["sgd", "adam"]


@dataclass(frozen=True)
class Ensemble:
    """K trained copies of a model.

    Attributes:
        parameters: (K, P), parameters that require gradients in `named_parameters()` order.
        losses: (K, num_epochs), mean loss of each epoch's batches, as met on the way, with the copy's weights.
        learning_rates: of each step, the same for all copies.
    """

    parameters: Tensor
    losses: Tensor
    learning_rates: tuple[float, ...]


def descend(
    start: Tensor,
    gradient: EnsembleGradient,
    order: BatchOrder,
    *,
    lr: float,
    optimizer: EnsembleOptimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    depends_on: Mapping[str, Any] | None = None,
    generator: torch.Generator,
    on_step: Callable[[int], None] | None = None,
) -> Ensemble:
    """Return where K copies end that all see the same batches.

    `torch.optim` moves the (K, P) positions as one parameter: its SGD and Adam work number by number, so that the
    copies do not see each other.

    Args:
        start: (K, P), not changed.
        gradient: the K losses of a batch, and their gradients.
        order: the batches.
        lr: learning rate.
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        weight_decay: L2, loss + weight_decay / 2 ||w||².
        schedule: as for `train`.
        checkpoint: as for `train`.
        checkpoint_every: likewise.
        depends_on: what `gradient` is made of, as settings of the checkpoint.
        generator: source of the order of examples, unless it is given.
        on_step: called with the number of steps taken, after each of them.

    Raises:
        TrainingDivergedError: the loss of a copy was not finite.

    Cost: one call of `gradient` for each step. Memory: 3 K P numbers with SGD, 4 K P with Adam.
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    positions = start.clone()
    stepper = _optimizer(optimizer, positions, lr=lr, momentum=momentum, weight_decay=weight_decay)
    factors = named_schedule(schedule)
    place, now = None, _Progress()
    if checkpoint is not None:
        settings = {
            **(depends_on or {}),
            "start": fingerprint([positions]),
            "optimizer": (optimizer, lr, momentum, weight_decay),
            "schedule": described(schedule),
            "num_steps": order.num_steps,
            "batches": (order.steps_per_epoch, fingerprint(order.given)),
            "generator": fingerprint([generator.get_state()]),
        }
        place = Checkpoint(checkpoint, settings, every=checkpoint_every)
        now = _resumed(place, positions, stepper, generator)
    for epoch in range(len(now.means), order.num_epochs):
        taken = len(now.rates) - epoch * order.steps_per_epoch
        if taken == 0:
            now.begin_epoch(order.epoch(epoch, generator), len(positions))
        for indices in now.batches[taken:]:
            losses, positions.grad = gradient(positions, indices.to(positions.device))
            values = losses.double().cpu()
            if not bool(values.isfinite().all()):
                raise _diverged(values, epoch, lr)
            now.rates.append(lr if factors is None else lr * factors(len(now.rates), order.num_steps))
            stepper.param_groups[0]["lr"] = now.rates[-1]
            stepper.step()
            now.total += values * len(indices)
            if place is not None and place.due(len(now.rates)):
                place.save(_state(now, positions, stepper, generator))
            if on_step is not None:
                on_step(len(now.rates))
        now.means.append(now.total / sum(map(len, now.batches)))
    positions.grad = None
    return Ensemble(positions, torch.stack(now.means, dim=1), tuple(now.rates))


@dataclass
class _Progress:
    """How far a descent is.

    Attributes:
        rates: of the steps taken.
        means: (K,) for each finished epoch.
        batches: of the epoch at work.
        total: (K,), the sum of its examples' losses so far.
    """

    rates: list[float] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    batches: list[Tensor] = field(default_factory=list)
    total: Tensor = field(default_factory=lambda: torch.zeros(0))

    def begin_epoch(self, batches: list[Tensor], num_copies: int) -> None:
        """Take up the batches of a new epoch."""
        self.batches, self.total = batches, torch.zeros(num_copies, dtype=torch.float64)


def _state(
    now: _Progress, positions: Tensor, stepper: torch.optim.Optimizer, generator: torch.Generator
) -> dict[str, Any]:
    return {
        "progress": vars(now),
        "positions": positions,
        "optimizer": stepper.state_dict(),
        "generator": generator.get_state(),
    }


def _resumed(
    place: Checkpoint, positions: Tensor, stepper: torch.optim.Optimizer, generator: torch.Generator
) -> _Progress:
    """Return how far the checkpoint is, after putting everything where it was then."""
    stored = place.load()
    if stored is None:
        return _Progress()
    positions.copy_(stored["positions"])
    stepper.load_state_dict(stored["optimizer"])
    generator.set_state(stored["generator"])
    return _Progress(**stored["progress"])


def _optimizer(
    name: EnsembleOptimizer, positions: Tensor, *, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([positions], lr=lr, momentum=momentum, weight_decay=weight_decay)
    if name == "adam":
        return torch.optim.Adam([positions], lr=lr, weight_decay=weight_decay)
    raise ValueError(f"unknown optimizer '{name}': choose sgd or adam for copies that are trained at once")


def _diverged(values: Tensor, epoch: int, lr: float) -> TrainingDivergedError:
    copies = (~values.isfinite()).nonzero().flatten()[:5].tolist()
    return TrainingDivergedError(
        f"training diverged: the loss of copies {copies} is not finite in epoch {epoch} at lr={lr:.3g}. Lower the "
        f"learning rate, for example to lr={lr / 10:.3g}."
    )
