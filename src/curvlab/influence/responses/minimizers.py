"""How an objective is minimised: by the paper's SGD or Adam on shared batches, or to a gradient norm by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvlab.iterate import Checkpoint
from curvlab.training import BatchOrder, TrainingDivergedError, descend, minimize
from curvlab.training.descent import DescentState, EnsembleOptimizer, MinimisationState
from curvlab.training.schedules import Schedule, ScheduleName


class Objective(Protocol):
    """K functions of displacements (K, P), each estimated on a batch of examples by their indices (B,)."""

    @property
    def depends_on(self) -> Mapping[str, Any]:
        """Return what it is made of, as settings of a checkpoint."""

    def __call__(self, displacement: Tensor, indices: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""


class Minimizer(Protocol):
    """Anything that moves K displacements down an objective."""

    def __call__(self, objective: Objective, start: Tensor, num_examples: int, /) -> Tensor:
        """Return where the displacements (K, P) end."""


@dataclass(frozen=True)
class SharedBatches:
    """SGD or Adam for all groups at once; every group sees the same batches.

    Attributes:
        batches: indices of each step's examples; what a retraining and the base run share.
        lr: learning rate; the paper divides the base run's by ten for the two Bregman objectives.
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        schedule: as for `train`.
        progress: as for `train`.
        callback: called with the `DescentState` after each step.
        checkpoint: as for `train`.
    """

    batches: list[Tensor]
    lr: float
    optimizer: EnsembleOptimizer = "sgd"
    momentum: float = 0.0
    schedule: ScheduleName | Schedule = "constant"
    progress: bool | str = True
    callback: Callable[[DescentState], object] | None = None
    checkpoint: str | Path | Checkpoint | None = None

    def __call__(self, objective: Objective, start: Tensor, num_examples: int, /) -> Tensor:
        """Return the displacements after the last batch."""
        return descend(
            start,
            objective,
            BatchOrder(num_examples, batch_size=len(self.batches[0]), given=self.batches),
            lr=self.lr,
            optimizer=self.optimizer,
            momentum=self.momentum,
            schedule=self.schedule,
            progress=self.progress,
            callback=self.callback,
            checkpoint=self.checkpoint,
            depends_on=objective.depends_on,
        ).parameters


@dataclass(frozen=True)
class FullBatchLBFGS:
    """L-BFGS with the gradient over all examples, to a gradient norm.

    It minimises the sum of the K objectives over all (K, P) displacements at once: no two of them share a number,
    so the minimiser of the sum is that of each.

    A line search compares values, which rounding hides at a gradient norm of about 1e-7 for a cost of size 1 in
    float64; from 1e-6 on the steps are those of the gradients alone.

    Attributes:
        gradient_norm: where to stop, over all groups together.
        max_steps: of 20 iterations each, at most; missing the gradient norm raises a TrainingDivergedError.
        progress: as for `train`.
        callback: called with the `MinimisationState` after each step of 20 iterations.
        checkpoint: as for `minimize`.
    """

    gradient_norm: float = 1e-9
    max_steps: int = 50
    progress: bool | str = True
    callback: Callable[[MinimisationState], object] | None = None
    checkpoint: str | Path | Checkpoint | None = None

    def __call__(self, objective: Objective, start: Tensor, num_examples: int, /) -> Tensor:
        """Return the minimisers."""
        found = nn.Parameter(start.clone())
        everything = torch.arange(num_examples, device=start.device)

        def closure() -> Tensor:
            values, found.grad = objective(found.detach(), everything)
            return values.sum()

        norms = (max(1e-6, self.gradient_norm), self.gradient_norm)
        optimizers = [
            torch.optim.LBFGS(
                [found],
                line_search_fn=line_search,
                # of the largest component: below norm / sqrt(K P) torch does not stop before the norm is reached
                tolerance_grad=norm / max(10.0, 2 * start.numel() ** 0.5),
                tolerance_change=0.0,
                history_size=30,
            )
            for line_search, norm in zip(("strong_wolfe", None), norms, strict=True)
        ]
        end = minimize(
            closure,
            [found],
            optimizers,
            gradient_norm=norms,
            max_steps=self.max_steps,
            progress=self.progress,
            callback=self.callback,
            checkpoint=self.checkpoint,
            depends_on=objective.depends_on,
        )
        if not end.converged:
            raise TrainingDivergedError(
                f"L-BFGS ended at a gradient norm of {end.gradient_norm:.2g}, not {self.gradient_norm:g}: "
                "allow more max_steps, or a larger gradient_norm."
            )
        return found.detach()
