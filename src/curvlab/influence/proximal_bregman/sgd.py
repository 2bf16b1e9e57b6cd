"""Minibatch SGD on the proximal Bregman objective, as the papers do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from curvlab.influence.proximal_bregman.objective import ProximalBregmanObjective
from curvlab.influence.proximal_bregman.response import Response


@dataclass(frozen=True)
class ProximalSGD:
    """θ <- θ - step_size · (batch estimate of ∇Q), from θ*, for all points on shared batches.

    Klochkov & Liu (2024), Sec. 4, match batch size, number of steps and step size to LiSSA: to first order in ε
    the iteration is then LiSSA's own, with other batches. Plain SGD with a constant step.

    Attributes:
        step_size: constant step.
        batch_size: training examples a step, drawn with replacement.
        num_steps: steps.
        callback: called with the step (from 1) after each, for progress bars.
    """

    step_size: float
    batch_size: int
    num_steps: int
    callback: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name in ("step_size", "batch_size", "num_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | None = None
    ) -> Response:
        """Return the last iterate. A point that overflows keeps a non-finite column, at no cost to the others.

        Cost: for each point 4F of num_steps batches, and at each step a gradient of the point itself.
        """
        displacement = objective.zeros()
        for step in range(1, self.num_steps + 1):
            gradient = objective.sampled_gradient(displacement, batch_size=self.batch_size, generator=generator)
            displacement = displacement - self.step_size * gradient
            if self.callback is not None:
                self.callback(step)
        return Response(
            displacement=displacement,
            gradient_norm=torch.full((objective.num_points,), torch.nan),
            converged=False,
            num_gradients=self.num_steps * self.batch_size / objective.num_examples * objective.num_points,
        )
