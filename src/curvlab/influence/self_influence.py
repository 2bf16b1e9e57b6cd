"""Self-influence: what leaving out a training example does to its own loss, and to the mean training loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvlab.arguments import positive, whole
from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.derivatives import checked_points, directional_derivatives, in_order, per_example_gradients
from curvlab.influence.results import Origin, PointScores
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, flatten, identity
from curvlab.problem import Data, Loss, OutputLoss, Problem
from curvlab.problem.batch import Inputs
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.shown import Summary, counted
from curvlab.solvers import Solver, default_solver
from curvlab.solvers.solver import checked_solver


@dataclass(frozen=True, repr=False)
class SelfInfluence(PointScores):
    """First-order changes of losses when training examples are left out one by one, K of them.

    Attributes:
        own: (K,), of the example's own loss, 1/N ∇l_kᵀ (G + damping I)⁻¹ ∇l_k; never negative.
        total: (K,), of the mean training loss, 1/N ∇Jᵀ (G + damping I)⁻¹ ∇l_k with ∇J = 1/N sum_n ∇l_n.
            For reduction="sum", where G is a sum, both without the first 1/N.
        residual: largest relative residual of the systems behind them.
        converged: whether all systems reached the solver's tolerance.
        num_matvecs: curvature products, counted per vector.
        points: (K,), indices of the training examples.
        origin: model, loss, data and settings that they are of.

    `top(k)` are the k examples of the highest self-influence, (1, k), `table` and `plot` show them and the lowest.
    """

    own: Tensor
    total: Tensor
    residual: float
    converged: bool
    num_matvecs: int
    points: Tensor | None = None
    origin: Origin | None = None

    parts: ClassVar[Mapping[str, type]] = {"origin": Origin}
    best_is_lowest: ClassVar[bool] = False
    meaning: ClassVar[tuple[str, str]] = ("falls", "rises")
    row: ClassVar[str] = "row"

    @property
    def scores(self) -> Tensor:  # type: ignore[override]  # a field of the others
        """`own` as one row, (1, K)."""
        return self.own[None]

    @property
    def sign_and_unit(self) -> str:
        """What a score says."""
        return f"positive: the loss rises without the example; {self.unit}"

    def row_title(self, row: int) -> str:
        """Return what stands over the picture."""
        return "self-influence"

    def _beside(self) -> dict[str, Tensor]:
        return {"total": self.total, "residual": torch.tensor([self.residual])}

    def summary(self) -> Summary:
        """Return the range of the scores, residual, cost, and whether a system was left unsolved."""
        missed = "not converged: allow more steps, or raise the damping"
        return Summary(
            "self-influence",
            f"from {float(self.own.min()):.3g} to {float(self.own.max()):.3g} ({self.sign_and_unit})",
            f"{counted(len(self.own), 'example')}; residual {self.residual:.2g} at most",
            (counted(self.num_matvecs, "product"),),
            () if self.converged else (missed,),
        )


@can_be_silent
def self_influence(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train: Data | None = None,
    *,
    points: Tensor | Sequence[int] | None = None,
    damping: float,
    num_probes: int | None = None,
    columns: int = 100,
    solver: Solver | None = None,
    rtol: float = 1e-2,
    batch_size: int | None = None,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    progress: bool | str = True,
    callback: Callable[[SolvedState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int | None = None,
) -> SelfInfluence:
    """Return self-influences (Koh & Liang 2017), exact, or estimated from a few probes.

    Leaving out one of N examples is a weight of -1/N, and of -1 for reduction="sum"; a change is positive where
    the loss rises.

    Probes: with M = G + damping I and Gaussian y of covariance M, x = M⁻¹ y has covariance M⁻¹: (∇l_nᵀ x)² has
    the mean ∇l_nᵀ M⁻¹ ∇l_n for every example at once; from `num_probes` of them the relative standard error is
    √(2 / num_probes), the same for large and small scores. y = 1/√N sum_n J_nᵀ S_n^½ ξ_n + √damping ζ with normal
    ξ, ζ. This is how leverage scores are estimated (Spielman & Srivastava 2011); `own` are those of a ridge
    regression, up to the residuals. `total` is one system, and not estimated.

    Args:
        model: in eval mode, for probes with outputs (N, C); or a `Problem` in the place of model, loss, train and
            weights.
        loss: as for `influence`.
        train: data whose mean Gauss-Newton matrix is G, in any form that `Batches` takes.
        points: indices of the examples that are asked for, (K,); None: all.
        damping: added to G; positive.
        num_probes: estimate `own` from so many; 200 leave 10 %. None: exact, a system for each point.
        columns: right-hand sides solved together, which sets the memory: some vectors of P numbers for
            each, for any number of points.
        solver: None: `default_solver`.
        rtol: residual of the default solver.
        batch_size: examples at a time; half as many whenever memory runs out, with a MemoryWarning.
        memory_budget: bytes for each product, see curvlab.curvature.DataOperator.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: G
            and ∇J are then weighted, and leaving example k out is a weight of -w_k/N, so that both changes have
            the factor w_k. `own` is of l_k itself, `total` of the weighted mean loss.
        progress: show a bar, one step for each group of columns; a text is its name.
        callback: called with the `SolvedState` after each of them.
        checkpoint: file in which what has been solved is kept; the same call goes on there.
        generator: of the probes and of the solver, or a seed; by default 0.

    Cost: a system for each point; `num_probes` + 1, and for each of these a derivative of all losses along its
    solution.
    """
    problem = Problem.of(model, loss, train, weights, memory_budget, batch_size=batch_size).normalised()
    chosen, columns = checked_points(points, problem.num_examples), whole("columns", columns)
    damping = positive("damping", damping, "the Gauss-Newton matrix may be singular")
    operator = GaussNewtonOperator(problem) + damping * identity
    if num_probes is not None:
        num_probes, generator = whole("num_probes", num_probes), generator_of(generator, operator.device)
    system = _System(problem, operator, solver, rtol, generator)
    method = (
        _Exact(system, chosen, columns) if num_probes is None else _Estimated(system, chosen, columns, num_probes)
    )
    return iterate(
        method,
        name="self-influence",
        total=method.num_groups,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


# ----------------------------------------------------------------------------- groups of systems
@dataclass(frozen=True)
class SolvedState:
    """What has been solved.

    Attributes:
        own: a part for each group of systems.
        total: likewise.
        residual: largest relative residual so far.
        converged: whether all systems were solved.
        num_matvecs: products, counted per vector.
        num_steps: groups.
        generator: that was given, if any.
    """

    own: list[Tensor] = field(default_factory=list)
    total: list[Tensor] = field(default_factory=list)
    residual: float = 0.0
    converged: bool = True
    num_matvecs: int = 0
    num_steps: int = 0
    done: bool = False
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class _System:
    """(G + damping I) x = b, and how it is solved."""

    problem: Problem
    operator: LinearOperator
    solver: Solver | None
    rtol: float
    generator: torch.Generator | int | None

    def solve(self, state: SolvedState, sides: Tensor) -> tuple[Tensor, SolvedState]:
        """Return A⁻¹ B, and the state with its outcome."""
        operator, solver = self.operator, self.solver
        if solver is None:
            solver = default_solver(operator.shape[0], sides.shape[1], rtol=self.rtol)
        generator = generator_of(self.generator, operator.device)
        solution = checked_solver(solver).solve(operator, sides, generator=generator)
        return solution.x, replace(
            state,
            residual=max(state.residual, float(solution.residual.max())),
            converged=state.converged and bool(solution.converged),
            num_matvecs=state.num_matvecs + solution.num_matvecs,
            num_steps=state.num_steps + 1,
        )

    def depends_on(self) -> dict[str, Any]:
        """Return what solutions depend on."""
        own = {"rtol": self.rtol, "solver": self.solver, "seed": self.generator}
        return own | {"operator": self.operator, "gradient": self.mean_gradient()}

    def start(self) -> SolvedState:
        """Return the state before the first group."""
        return SolvedState(generator=self.generator if isinstance(self.generator, torch.Generator) else None)

    def mean_gradient(self) -> Tensor:
        """Return 1/N sum_n w_n ∇l_n, (P,), of a sum, too."""
        gradient = self.problem.gradient()
        return gradient / self.problem.num_examples if self.problem.loss.reduction == "sum" else gradient

    def left_out(self, solved: SolvedState, own: Tensor, total: Tensor, points: Tensor) -> SelfInfluence:
        """Return changes per unit of weight as those of leaving each point out."""
        problem, weights = self.problem, self.problem.weights
        divisor = 1 if problem.loss.reduction == "sum" else problem.num_examples
        changes = [own / divisor, total / divisor]
        if weights is not None:
            changes = [change * weights[points].to(own) for change in changes]
        solver = self.solver or f"default_solver(rtol={self.rtol:g})"
        origin = Origin.of(problem, damping=self.operator.damping, curvature="Gauss-Newton", solver=solver)
        outcome = (solved.residual, solved.converged, solved.num_matvecs)
        return SelfInfluence(changes[0], changes[1], *outcome, points, origin)


class _Exact:
    """A system for each point, `columns` together."""

    def __init__(self, system: _System, points: Tensor, columns: int) -> None:
        self.system, self.points, self.groups = system, points, points.split(columns)
        self.num_groups = len(self.groups)

    def depends_on(self) -> Mapping[str, Any]:
        return self.system.depends_on() | {"points": list(self.groups)}

    def init(self) -> SolvedState:
        self.mean_gradient = self.system.mean_gradient()
        return self.system.start()

    def step(self, state: SolvedState) -> SolvedState:
        points = in_order(self.system.problem, self.groups[state.num_steps])
        gradients = per_example_gradients(points).T.contiguous()
        x, solved = self.system.solve(state, gradients)
        return replace(
            solved,
            own=[*state.own, (gradients * x).sum(0)],
            total=[*state.total, self.mean_gradient @ x],
            done=solved.num_steps == self.num_groups,
        )

    def result(self, state: SolvedState) -> SelfInfluence:
        return self.system.left_out(state, torch.cat(state.own), torch.cat(state.total), self.points)


class _Estimated:
    """A system for each probe, `columns` together, and one for the mean gradient."""

    def __init__(self, system: _System, points: Tensor, columns: int, num_probes: int) -> None:
        self.system, self.points, self.num_probes = system, points, num_probes
        self.counts = [min(columns, num_probes - start) for start in range(0, num_probes, columns)]
        self.num_groups = len(self.counts) + 1

    def depends_on(self) -> Mapping[str, Any]:
        return self.system.depends_on() | {"num_probes": self.counts}

    def init(self) -> SolvedState:
        return self.system.start()

    def step(self, state: SolvedState) -> SolvedState:
        problem, generator = self.system.problem, generator_of(self.system.generator)
        everyone = replace(problem, weights=None)
        if state.num_steps == len(self.counts):
            x, solved = self.system.solve(state, self.system.mean_gradient()[:, None])
            total = directional_derivatives(everyone, directions=x)[:, 0]
            return replace(solved, total=[total], done=True)
        probes = curvature_probes(problem, self.counts[state.num_steps], generator)
        probes += math.sqrt(self.system.operator.damping) * _normal_like(tuple(probes.shape), probes, generator)
        x, solved = self.system.solve(state, probes)
        squares = directional_derivatives(everyone, directions=x).square().sum(1)
        return replace(solved, own=[squares + (state.own[0] if state.own else torch.zeros_like(squares))])

    def result(self, state: SolvedState) -> SelfInfluence:
        own = state.own[0] / self.num_probes
        return self.system.left_out(state, own[self.points], state.total[0][self.points], self.points)


# -------------------------------------------------------------------------------------- probes
def curvature_probes(problem: Problem, count: int, generator: torch.Generator) -> Tensor:
    """Return normal vectors of covariance G, (P, count), from half a batch at a time whenever memory runs out."""

    def of_batch(inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
        leaves = [value.detach().requires_grad_() for value in problem.parameters]
        with torch.enable_grad():
            outputs = problem.function(leaves, inputs)
        if outputs.ndim != 2:
            raise ValueError(
                f"probes need outputs (N, C), got {tuple(outputs.shape)}: for sequences leave num_probes out"
            )
        root = _curvature_root(outputs.detach(), targets, problem.loss)
        if weights is not None:
            root = root * weights.to(root).sqrt()[:, None, None]
        drawn = torch.einsum("kni,nij->knj", _normal_like((count, *outputs.shape), outputs, generator), root)
        pulled = [
            flatten(torch.autograd.grad(outputs, leaves, cotangent, retain_graph=True, materialize_grads=True))
            for cotangent in drawn
        ]
        return torch.stack(pulled, dim=1)

    return sum(problem.map(of_batch, name="probes"), start=torch.zeros(())) / math.sqrt(problem.divisor)


def _curvature_root(outputs: Tensor, targets: Tensor, loss: OutputLoss) -> Tensor:
    """Return S_n^½, the symmetric root of each example's output Hessian, (N, C, C)."""
    values, vectors = torch.linalg.eigh(loss.dense_hessians(outputs, targets))
    return (vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT


def _normal_like(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers with the dtype and device of `like`."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)
