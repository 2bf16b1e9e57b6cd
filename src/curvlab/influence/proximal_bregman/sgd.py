"""Minibatch SGD on the proximal Bregman objective, as the papers do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from curvlab.checkpoint import Checkpoint, described, fingerprint
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
        checkpoint: file in which the unfinished iterate is kept, saved every minute; the same call resumes there.
        checkpoint_every: save after so many steps, too.
    """

    step_size: float
    batch_size: int
    num_steps: int
    callback: Callable[[int], None] | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

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
        generator = generator or torch.default_generator
        checkpoint = self._checkpoint(objective, generator)
        stored = None if checkpoint is None else checkpoint.load()
        displacement, first = objective.zeros(), 1
        if stored is not None:
            displacement, first = stored["displacement"].to(displacement), stored["step"] + 1
            generator.set_state(stored["generator"])
        for step in range(first, self.num_steps + 1):
            gradient = objective.sampled_gradient(displacement, batch_size=self.batch_size, generator=generator)
            displacement = displacement - self.step_size * gradient
            if checkpoint is not None and checkpoint.due(step):
                state = {"displacement": displacement, "step": step, "generator": generator.get_state()}
                checkpoint.save(state)
            if self.callback is not None:
                self.callback(step)
        return Response(
            displacement=displacement,
            gradient_norm=torch.full((objective.num_points,), torch.nan),
            converged=False,
            num_gradients=self.num_steps * self.batch_size / objective.num_examples * objective.num_points,
        )

    def _checkpoint(self, objective: ProximalBregmanObjective, generator: torch.Generator) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        settings = {
            "step_size": self.step_size,
            "batch_size": self.batch_size,
            "num_steps": self.num_steps,
            "damping": objective.damping,
            "loss": described(objective.loss_module),
            "objective": lambda: fingerprint(objective.fixed_tensors()),
            "generator": fingerprint([generator.get_state()]),
        }
        return Checkpoint(self.checkpoint, settings, every=self.checkpoint_every)
