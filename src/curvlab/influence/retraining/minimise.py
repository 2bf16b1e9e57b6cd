"""How objectives are minimised: as the papers do it, on batches, or to a gradient norm, by Newton or L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvlab.arguments import positive, whole
from curvlab.influence.retraining.points import ProximalBregmanObjective
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import BlockConjugateGradient, Solver
from curvlab.solvers.solver import IterativeSolver
from curvlab.training import BatchOrder, TrainingDivergedError, descend, minimize
from curvlab.training.descent import EnsembleOptimizer
from curvlab.training.schedules import Schedule, ScheduleName


@dataclass(frozen=True, kw_only=True)
class _Minimiser:
    """What every one of them is told beside its settings, see `curvlab.iterate.iterate`.

    Attributes:
        progress: show a bar; a text is its name.
        callback: called after each step with its state, whose `num_steps` counts from 1.
        checkpoint: file in which the unfinished state is kept, saved every minute; the same call resumes there.
    """

    progress: bool | str = True
    callback: Callable[[Any], object] | None = None
    checkpoint: str | Path | Checkpoint | None = None

    @property
    def driver(self) -> dict[str, Any]:
        return {"progress": self.progress, "callback": self.callback, "checkpoint": self.checkpoint}


# ---------------------------------------------------------------- groups of examples: displacements
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
class SharedBatches(_Minimiser):
    """SGD or Adam for all groups at once; every group sees the same batches.

    Attributes:
        batches: indices of each step's examples; what a retraining and the base run share.
        lr: learning rate; the paper divides the base run's by ten for the two Bregman objectives.
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        schedule: as for `train`.
    """

    batches: list[Tensor]
    lr: float
    optimizer: EnsembleOptimizer = "sgd"
    momentum: float = 0.0
    schedule: ScheduleName | Schedule = "constant"

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
            depends_on=objective.depends_on,
            **self.driver,
        ).parameters


@dataclass(frozen=True)
class FullBatchLBFGS(_Minimiser):
    """L-BFGS with the gradient over all examples, to a gradient norm; a step is 20 iterations.

    It minimises the sum of the K objectives over all (K, P) displacements at once: no two of them share a number,
    so the minimiser of the sum is that of each.

    A line search compares values, which rounding hides at a gradient norm of about 1e-7 for a cost of size 1 in
    float64; from 1e-6 on the steps are those of the gradients alone.

    Attributes:
        gradient_norm: where to stop, over all groups together.
        max_steps: at most; missing the gradient norm raises a TrainingDivergedError.
    """

    gradient_norm: float = 1e-9
    max_steps: int = 50

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
            depends_on=objective.depends_on,
            **self.driver,
        )
        if not end.converged:
            raise TrainingDivergedError(
                f"L-BFGS ended at a gradient norm of {end.gradient_norm:.2g}, not {self.gradient_norm:g}: "
                "allow more max_steps, or a larger gradient_norm."
            )
        return found.detach()


# ------------------------------------------------------------- single points: in units of their weight
@dataclass(frozen=True, repr=False)
class Response(Shown):
    """Result of minimising the proximal Bregman objective for K points.

    Attributes:
        displacement: (P, K), (θ - θ*) / ε.
        gradient_norm: (K,), ‖∇Q‖ at the end over ‖∇Q‖ at θ*, on the full data; nan where it was not computed.
        converged: all columns reached the optimiser's tolerance; False for SGD, which has none.
        num_gradients: example gradients in full-data equivalents, counted per point.
        num_matvecs: curvature products, counted per vector.
    """

    displacement: Tensor
    gradient_norm: Tensor
    converged: bool
    num_gradients: float
    num_matvecs: int = 0

    def summary(self) -> Summary:
        """Return how far the points moved, what is left of the gradient, and the cost."""
        norms = self.displacement.norm(dim=0)
        return Summary(
            "response: ‖θ - θ*‖ / ε",
            f"from {float(norms.min()):.3g} to {float(norms.max()):.3g}",
            f"{counted(len(norms), 'point')}; gradient norm {float(self.gradient_norm.max()):.2g} at most",
            (f"{self.num_gradients:,.0f} gradients", counted(self.num_matvecs, "product")),
        )


class ProximalOptimizer(Protocol):
    """Anything that minimises a ProximalBregmanObjective."""

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | int | None = None
    ) -> Response:
        """Return the minimiser, started from θ*."""


@dataclass(frozen=True)
class ProximalSGD(_Minimiser):
    """θ <- θ - step_size · (batch estimate of ∇Q), from θ*, for all points on shared batches.

    Klochkov & Liu (2024), Sec. 4, match batch size, number of steps and step size to LiSSA: to first order in ε
    the iteration is then LiSSA's own, with other batches. Plain SGD with a constant step.

    Attributes:
        step_size: constant step.
        batch_size: training examples a step, drawn with replacement.
        num_steps: steps.
    """

    step_size: float
    batch_size: int
    num_steps: int

    def __post_init__(self) -> None:
        positive("step_size", self.step_size)
        whole("batch_size", self.batch_size)
        whole("num_steps", self.num_steps)

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | int | None = None
    ) -> Response:
        """Return the last iterate. A point that overflows keeps a non-finite column, at no cost to the others.

        Cost: for each point 4F of num_steps batches, and at each step a gradient of the point itself.
        """
        method = _SGD(self, objective, generator_of(generator))
        return iterate(method, name="proximal SGD", total=self.num_steps, **self.driver)


@dataclass(frozen=True)
class SGDState:
    """Where the points are: `displacement`, (P, K)."""

    displacement: Tensor
    generator: torch.Generator
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _SGD:
    settings: ProximalSGD
    objective: ProximalBregmanObjective
    generator: torch.Generator

    def depends_on(self) -> Mapping[str, Any]:
        own = {name: getattr(self.settings, name) for name in ("step_size", "batch_size", "num_steps")}
        return {**self.objective.depends_on(), **own, "generator": self.generator}

    def init(self) -> SGDState:
        return SGDState(self.objective.zeros(), self.generator)

    def step(self, state: SGDState) -> SGDState:
        settings, number = self.settings, state.num_steps + 1
        gradient = self.objective.sampled_gradient(
            state.displacement, batch_size=settings.batch_size, generator=state.generator
        )
        moved = state.displacement - settings.step_size * gradient
        return SGDState(moved, state.generator, number, number == settings.num_steps)

    def result(self, state: SGDState) -> Response:
        settings, objective = self.settings, self.objective
        return Response(
            displacement=state.displacement,
            gradient_norm=torch.full((objective.num_points,), torch.nan),
            converged=False,
            num_gradients=settings.num_steps * settings.batch_size / objective.num_examples * objective.num_points,
        )


@dataclass(frozen=True)
class ProximalNewton(_Minimiser):
    """θ <- θ - t M⁻¹ ∇Q(θ) with full-batch gradients of the objective itself, from θ*: the exact response.

    M is G + damping I at θ*, the Hessian of Q up to ε, shared by all points. The gradients decide where the
    method stops; M, solved by block conjugate gradients to a loose tolerance in `curvature_dtype`, only how fast.
    For small ε each step divides the gradient by about 1 / (the solver's rtol). A point that a step brings forward
    by less than half (ε is large, the curvature changes on the way) goes on with the Gauss-Newton matrix at its
    own θ. Steps are halved until the gradient norm falls, or the objective does.

    With a `checkpoint` an inner solver that takes steps has files beside it, <checkpoint>.<step>.<point>, so that
    a killed solve goes on, too.

    Attributes:
        rtol: stop when ‖∇Q‖ <= rtol ‖∇Q(θ*)‖ for every point. Rounding limits it to about 1e-16 / ε.
        max_steps: Newton steps at most.
        solver: inner solver; a loose tolerance is enough.
        curvature_dtype: dtype of the inner products; fp32 halves their cost and costs no accuracy.
    """

    rtol: float = 1e-6
    max_steps: int = 30
    solver: Solver = field(default_factory=lambda: BlockConjugateGradient(rtol=1e-3, max_steps=500))
    curvature_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        positive("rtol", self.rtol)
        whole("max_steps", self.max_steps)

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | int | None = None
    ) -> Response:
        """Return the minimiser with the relative gradient norm it reached. Deterministic."""
        return iterate(_Newton(self, objective), name="proximal Newton", **self.driver)


@dataclass(frozen=True)
class NewtonState:
    """Where the points are.

    Attributes:
        displacement: (P, K).
        gradient: (P, K), of the objective there.
        relative: (K,), its norms over those at θ*.
        slow: (K,), which points go on with a matrix of their own.
        num_gradients: of the full data, counted per point.
        num_matvecs: products, counted per vector.
        num_steps: Newton steps.
    """

    displacement: Tensor
    gradient: Tensor
    relative: Tensor
    slow: Tensor
    num_gradients: int
    num_matvecs: int = 0
    num_steps: int = 0
    done: bool = False

    @property
    def status(self) -> str:
        """The largest relative gradient norm."""
        return f"gradient norm {float(self.relative.max()):.2g}"


@dataclass
class _Newton:
    settings: ProximalNewton
    objective: ProximalBregmanObjective

    def depends_on(self) -> Mapping[str, Any]:
        own = {name: getattr(self.settings, name) for name in ("rtol", "max_steps", "solver", "curvature_dtype")}
        return {**self.objective.depends_on(), **own}

    def init(self) -> NewtonState:
        self.curvature = self.objective.curvature(self.settings.curvature_dtype)
        at_start = self.objective.zeros()
        gradient = self.objective.gradient(at_start)
        norms = _norm(gradient)
        self.first = torch.where(norms > 0, norms, torch.ones_like(norms))
        slow = torch.zeros_like(norms, dtype=torch.bool)
        relative = norms / self.first
        return NewtonState(
            at_start, gradient, relative, slow, self.objective.num_points, done=self._ends(relative, 0)
        )

    def step(self, state: NewtonState) -> NewtonState:
        active = (state.relative > self.settings.rtol).nonzero().flatten()
        direction, num_matvecs = self._direction(state, active)
        moved, at_moved, tried = _backtrack(
            self.objective, state.displacement[:, active], state.gradient[:, active], direction, active
        )
        state.displacement[:, active], state.gradient[:, active] = moved, at_moved
        relative, number = _norm(state.gradient) / self.first, state.num_steps + 1
        return replace(
            state,
            relative=relative,
            slow=state.slow | (relative > 0.5 * state.relative),
            num_gradients=state.num_gradients + tried,
            num_matvecs=state.num_matvecs + num_matvecs,
            num_steps=number,
            done=self._ends(relative, number),
        )

    def result(self, state: NewtonState) -> Response:
        return Response(
            displacement=state.displacement,
            gradient_norm=state.relative,
            converged=bool((state.relative <= self.settings.rtol).all()),
            num_gradients=state.num_gradients,
            num_matvecs=state.num_matvecs,
        )

    def _ends(self, relative: Tensor, num_steps: int) -> bool:
        return num_steps >= self.settings.max_steps or not bool((relative > self.settings.rtol).any())

    def _direction(self, state: NewtonState, active: Tensor) -> tuple[Tensor, int]:
        """Return M⁻¹∇Q for the active points, with the shared matrix or, for slow ones, their own."""
        # Scaled to unit norm: in fp32 the inner solve must not meet the tiny numbers of a late residual.
        dtype, scale = self.settings.curvature_dtype, _norm(state.gradient[:, active])
        rhs = (state.gradient[:, active] / scale).to(dtype)
        direction, num_matvecs = torch.zeros_like(rhs), 0
        slow = state.slow[active]

        def solve(operator: LinearOperator, columns: Tensor | int, name: object) -> int:
            solver, place = self.settings.solver, self.settings.checkpoint
            if place is not None and isinstance(solver, IterativeSolver):
                path = place.path if isinstance(place, Checkpoint) else place
                solver = replace(solver, checkpoint=f"{path}.{state.num_steps}.{name}")
            solution = solver.solve(operator, rhs[:, columns])
            direction[:, columns] = solution.x
            return solution.num_matvecs

        if not slow.all():
            num_matvecs += solve(self.curvature, ~slow, "shared")
        for column in slow.nonzero().flatten().tolist():
            index = int(active[column])
            own = self.objective.curvature_at(state.displacement[:, index], index, dtype)
            num_matvecs += solve(own, column, index)
        return direction.to(state.gradient.dtype) * scale, num_matvecs


def _backtrack(
    objective: ProximalBregmanObjective, start: Tensor, gradient: Tensor, direction: Tensor, points: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return (u - t·direction, its gradient, gradients computed), t halved until it is accepted."""
    moved, at_moved = start.clone(), gradient.clone()
    remaining = torch.arange(start.shape[1], device=start.device)
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
