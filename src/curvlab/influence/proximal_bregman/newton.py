"""The exact response: a full-batch Newton-type method on the proximal Bregman objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint, described, fingerprint
from curvlab.influence.proximal_bregman.inner_solves import InnerSolves
from curvlab.influence.proximal_bregman.objective import ProximalBregmanObjective
from curvlab.influence.proximal_bregman.response import Response
from curvlab.linalg import LinearOperator
from curvlab.solvers import BlockConjugateGradient, Solver


@dataclass(frozen=True)
class ProximalNewton:
    """θ <- θ - t M⁻¹ ∇Q(θ) with full-batch gradients of the objective itself, from θ*.

    M is G + damping I at θ*, the Hessian of Q up to ε, shared by all points. The gradients decide where the
    method stops; M, solved by block conjugate gradients to a loose tolerance in `curvature_dtype`, only how fast.
    For small ε each step divides the gradient by about 1 / (the solver's rtol). A point that a step brings forward
    by less than half (ε is large, the curvature changes on the way) goes on with the Gauss-Newton matrix at its
    own θ. Steps are halved until the gradient norm falls, or the objective does.

    Attributes:
        rtol: stop when ‖∇Q‖ <= rtol ‖∇Q(θ*)‖ for every point. Rounding limits it to about 1e-16 / ε.
        max_steps: Newton steps at most.
        solver: inner solver; a loose tolerance is enough.
        curvature_dtype: dtype of the inner products; fp32 halves their cost and costs no accuracy.
        callback: called with (step, relative gradient norms) before each step.
        checkpoint: file in which the iterate is kept, saved after a step when a minute has passed; within a step
            the inner solver, conjugate gradients or minimum residuals, has files beside it,
            <checkpoint>.<step>.<point>. The same call goes on there and ends at the same numbers.
        checkpoint_every: save after so many steps, too.
    """

    rtol: float = 1e-6
    max_steps: int = 30
    solver: Solver = field(default_factory=lambda: BlockConjugateGradient(rtol=1e-3, max_steps=500))
    curvature_dtype: torch.dtype = torch.float32
    callback: Callable[[int, Tensor], None] | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | None = None
    ) -> Response:
        """Return the minimiser with the relative gradient norm it reached. Deterministic."""
        curvature = objective.curvature(self.curvature_dtype)
        displacement, first = objective.zeros(), 0
        checkpoint, solves = self._checkpoint(objective), InnerSolves(self.solver, self.checkpoint)
        if checkpoint is not None and (kept := checkpoint.load()) is not None:
            first, num_gradients, num_matvecs = kept["step"], kept["num_gradients"], kept["num_matvecs"]
            displacement, gradient, start = (part.to(displacement) for part in kept["columns"])
            slow = kept["slow"].to(displacement.device)
        else:
            gradient = objective.gradient(displacement)
            start = _norm(gradient)
            start = torch.where(start > 0, start, torch.ones_like(start))
            num_gradients, num_matvecs = objective.num_points, 0
            slow = torch.zeros_like(start, dtype=torch.bool)
        for step in range(first, self.max_steps):
            relative = _norm(gradient) / start
            if self.callback is not None:
                self.callback(step, relative)
            active = (relative > self.rtol).nonzero().flatten()
            if len(active) == 0:
                break
            solves.step = step
            direction, cost = self._direction(
                objective, curvature, displacement, gradient, active=active, slow=slow, solves=solves
            )
            num_matvecs += cost
            moved, at_moved, tried = _backtrack(
                objective, displacement[:, active], gradient[:, active], direction, active
            )
            num_gradients += tried
            displacement[:, active], gradient[:, active] = moved, at_moved
            slow |= _norm(gradient) / start > 0.5 * relative
            if checkpoint is not None and checkpoint.due(step + 1):
                done = {"step": step + 1, "num_gradients": num_gradients, "num_matvecs": num_matvecs, "slow": slow}
                checkpoint.save(done | {"columns": [displacement, gradient, start]})
                solves.forget()
        solves.forget()
        relative = _norm(gradient) / start
        return Response(
            displacement=displacement,
            gradient_norm=relative,
            converged=bool((relative <= self.rtol).all()),
            num_gradients=num_gradients,
            num_matvecs=num_matvecs,
        )

    def _direction(
        self,
        objective: ProximalBregmanObjective,
        shared: LinearOperator,
        displacement: Tensor,
        gradient: Tensor,
        *,
        active: Tensor,
        slow: Tensor,
        solves: InnerSolves,
    ) -> tuple[Tensor, int]:
        """Return M⁻¹∇Q for the active points, with the shared matrix or, for slow ones, their own."""
        # Scaled to unit norm: in fp32 the inner solve must not meet the tiny numbers of a late residual.
        scale = _norm(gradient[:, active])
        rhs = (gradient[:, active] / scale).to(self.curvature_dtype)
        direction, num_matvecs = torch.zeros_like(rhs), 0
        fast = ~slow[active]
        if fast.any():
            solution = solves.solve(shared, rhs[:, fast], "shared")
            direction[:, fast] = solution.x
            num_matvecs += solution.num_matvecs
        for column in (~fast).nonzero().flatten().tolist():
            index = int(active[column])
            own = objective.curvature_at(displacement[:, index], index, self.curvature_dtype)
            solution = solves.solve(own, rhs[:, column], str(index))
            direction[:, column] = solution.x
            num_matvecs += solution.num_matvecs
        return direction.to(gradient.dtype) * scale, num_matvecs

    def _checkpoint(self, objective: ProximalBregmanObjective) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        settings = {
            "damping": objective.damping,
            "loss": described(objective.loss_module),
            "rtol": self.rtol,  # a point that has arrived takes no further step
            "curvature_dtype": self.curvature_dtype,
            "objective": lambda: fingerprint(objective.fixed_tensors()),
        }
        return Checkpoint(self.checkpoint, settings, every=self.checkpoint_every)


def _backtrack(
    objective: ProximalBregmanObjective, start: Tensor, gradient: Tensor, direction: Tensor, points: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return (u - t·direction, its gradient, gradients computed), t halved until it is accepted."""
    moved, at_moved = start.clone(), gradient.clone()
    remaining = torch.arange(start.shape[1])
    length, tried = 1.0, 0
    while len(remaining) and length > 1e-3:
        candidate = start[:, remaining] - length * direction[:, remaining]
        at_candidate = objective.gradient(candidate, columns=points[remaining])
        tried += len(remaining)
        accepted = _norm(at_candidate) < (1 - 0.1 * length) * _norm(gradient[:, remaining])
        if not accepted.all():
            # On the way to a minimum of a function that is not convex the gradient may have to grow (Armijo).
            before = objective.value(start[:, remaining], columns=points[remaining])
            after = objective.value(candidate, columns=points[remaining])
            slope = objective.epsilon[points[remaining]] ** 2
            slope *= (gradient[:, remaining] * direction[:, remaining]).sum(0)
            accepted |= after < before - 1e-4 * length * slope
        chosen = remaining[accepted]
        moved[:, chosen], at_moved[:, chosen] = candidate[:, accepted], at_candidate[:, accepted]
        remaining = remaining[~accepted]
        length /= 2
    return moved, at_moved, tried


def _norm(columns: Tensor) -> Tensor:
    return torch.linalg.vector_norm(columns, dim=0)
