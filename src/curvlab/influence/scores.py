"""Influence of training points on test points through the damped inverse Gauss-Newton matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from curvlab.arguments import positive, tensor
from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.derivatives import (
    Measurement,
    OverProcesses,
    directional_derivatives,
    per_example_gradients,
    sources_of,
)
from curvlab.influence.lengths import Retraining
from curvlab.influence.results import Origin, PointScores
from curvlab.iterate import Checkpoint
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.parameters import checked_model
from curvlab.problem.problem import DEFAULT_BATCH_SIZE
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.shown import Summary, counted
from curvlab.solvers import Solution, Solver, TrainingFilter, default_solver
from curvlab.solvers.solver import IterativeSolver, checked_solver
from curvlab.training import RunLength, TrainingHistory, TrainingRun


@dataclass(frozen=True, repr=False)
class Influence(PointScores):
    """Scores with the solution behind them.

    Attributes:
        scores: (num_test, num_points), the change of a test example's loss (or measurement) per unit of weight
            that is added to a point's loss: a negative point lowers it.
        solution: of (G + damping I) X = B, or what the filter gives; residual per right-hand side.
        solved_for: which side's gradients B holds: the smaller one.
        points: (num_points,), indices of the training examples that the columns belong to; None for candidates,
            and over processes.
        origin: model, loss, data and settings that they are of; None over processes.

    `top`, `table` and `plot` show the most helpful and harmful points, `save` and `load` keep all of it.
    """

    scores: Tensor
    solution: Solution
    solved_for: str
    points: Tensor | None = None
    origin: Origin | None = None

    parts: ClassVar[Mapping[str, type]] = {"solution": Solution, "origin": Origin}

    def summary(self) -> Summary:
        """Return the range of the scores with its sign and unit, the solution's residual, cost and problems."""
        behind, (tests, points) = self.solution.summary(), self.scores.shape
        low, high = (float(self.scores.min()), float(self.scores.max())) if self.scores.numel() else (0.0, 0.0)
        return Summary(
            "influence scores",
            f"from {low:.3g} to {high:.3g} ({self.sign_and_unit})",
            f"{counted(tests, 'test example')} x {counted(points, 'point')}; residual {behind.value}",
            (*behind.cost, f"one system for each of the {self.solved_for}"),
            behind.problems,
        )

    def _beside(self) -> dict[str, Tensor]:
        residual = self.solution.residual
        return {"residual": residual[:, None] if self.solved_for == "test" else residual[None]}


def influence_scores(
    model: nn.Module | Problem | OverProcesses,
    loss: Loss | None = None,
    train: Data | None = None,
    test: Data | None = None,
    **settings: Any,
) -> Tensor:
    """Return the influence of training examples on `test`, (num_test, num_points).

    With the settings of `influence`, which returns the residuals behind the scores, too.
    """
    return influence(model, loss, train, test, **settings).scores


@can_be_silent
def influence(
    model: nn.Module | Problem | OverProcesses,
    loss: Loss | None = None,
    train: Data | None = None,
    test: Data | None = None,
    *,
    points: Tensor | Sequence[int] | None = None,
    candidates: Data | None = None,
    damping: float | None = None,
    run: TrainingHistory | RunLength | TrainingRun | None = None,
    retraining: Retraining | None = None,
    filtered: bool = False,
    solver: Solver | None = None,
    rtol: float | None = None,
    measurement: Measurement | None = None,
    batch_size: int | None = None,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    progress: bool = True,
    callback: Callable[[Any], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int | None = None,
) -> Influence:
    """Return -∇m(test)ᵀ (G + damping I)⁻¹ ∇l(z) for every test example and point z, with its residuals.

    The first-order change of the test measurement m (default: the loss, so a helpful point scores negative) per
    unit of weight that is added to z's loss in the mean training loss (Koh & Liang 2017; Klochkov & Liu 2024,
    Sec. 2, with f = -l). Leaving one of N points out is a weight of -1/N.

    Args:
        model: in eval mode. Or, in the place of model, loss, train and weights, a `Problem`; then pass `test` by
            name. Or, in the place of model, loss and train, an operator of curvlab.parallel: all its
            processes solve together, each scores its own training examples, and all get the scores of all, in the
            order of the processes. Then pass `test` by name, the same on every process, and no points.
        loss: as for DataOperator: with a closed form, or any mean over examples of the user's own. With class
            weights l(z) is z's term of the mean training loss: its weight, over the training set's mean weight,
            times its cross-entropy; so it is for the test loss, unless there is a measurement.
        train: data whose mean Gauss-Newton matrix is G, in any form that `Batches` takes.
        test: examples that are measured, likewise.
        points: indices of the training examples whose influence is asked for; None: all. Rows and columns are in
            the order of the data.
        candidates: other examples whose influence is asked for, as if they were added to the training set.
        damping: added to G once; positive. Or
        run: the training that led to `model`, by SGD: what `train` returned, or RunLength with the learning rates,
            momentum and weight decay of a loop of one's own; a recorded one of another model, or of other data, is
            refused. The damping is then weight decay + 1 / (ηT), with
            η / (1 - momentum) for η, less what momentum from rest has not yet carried along (`RunLength.time`;
            nothing to speak of in long runs): curvature that a run of that length cannot resolve.
        retraining: with `run`, which retraining is meant: one of as many steps as the run (the default), of as
            many epochs on a fraction f of the data, `Retraining.as_many_epochs(f)`, which is a damping of weight
            decay + 1 / (f ηT), or of a length of one's own.
        filtered: with `run`, the filter (1 - e^{-τμ}) / μ of the retraining's length τ (`TrainingFilter`) in the
            place of the damped inverse 1 / (μ + damping) that imitates it.
        solver: any of curvlab.solvers; by default `default_solver`, which takes all right-hand sides together,
            looks whether few examples hold most of the curvature (one forward of the data), and states its memory.
        rtol: residual of the default solver, or of the filter, 1e-2; with a `solver`, it has its own.
        measurement: (outputs, targets) -> (N,), one number for each test example.
        batch_size: examples at a time, 512 by default; fewer where memory asks for it.
        memory_budget: bytes for each pass, see curvlab.curvature.DataOperator.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: G is
            then `GaussNewtonOperator.weighted`. Scores stay per unit of weight added to l(z), so leaving example i
            out is a weight of -w_i/N. With an operator over processes those of this process's examples.
        progress: show bars; False silences the solver's, too.
        callback: called with the solver's state after each of its steps.
        checkpoint: file in which the unfinished solve is kept; the same call goes on there.
        generator: of the solver's random numbers, or a seed; by default 0 for every call.

    One system is solved for each example of the smaller side; the other side costs one directional derivative a
    system and no per-example gradients. A warning tells when the solver did not converge.
    """
    damping, time = curvature_added(damping, run, retraining, filtered=filtered)
    if solver is not None and rtol is not None:
        raise ValueError("rtol is that of the default solver: give it to the solver instead.")
    if solver is not None and checked_solver(solver) and filtered:
        raise ValueError("filtered=True has a solver of its own, TrainingFilter: leave one of the two out.")
    if not isinstance(model, Problem) and not hasattr(model, "example_gradients"):
        checked_model(model)
    if isinstance(model, nn.Module | Problem):
        if test is None or (points is not None and candidates is not None):
            raise TypeError("pass test=..., the examples that are measured; and points or candidates, not both")
        problem = Problem.of(model, loss, train, weights, memory_budget, batch_size=batch_size).normalised()
        check_run(run, problem)
        sides = _on_one_process(
            problem, test, points=points, candidates=candidates, measurement=measurement, batch_size=batch_size
        )
    elif test is None or any(g is not None for g in (loss, train, points, candidates, batch_size, memory_budget)):
        raise TypeError(
            "an operator over processes stands in the place of model, loss and train, and has its own batch size: "
            "influence(op, test=..., damping=...)"
        )
    else:
        sides = _over_processes(model, test, measurement=measurement, weights=weights)
    damped, rtol = sides.matrix + damping * identity, 1e-2 if rtol is None else rtol
    if time is not None:
        solver = TrainingFilter(time, rtol=rtol)
    elif solver is None:
        solver = default_solver(damped.shape[0], sides.solved.shape[1], rtol=rtol, operator=damped)
    solution = saving(solver, callback, checkpoint).solve(
        damped, sides.solved, generator=generator_of(generator, damped.device)
    )
    warn_unless_converged(solution)
    origin = None
    if sides.problem is not None:
        measured, added = measurement is not None, damping if time is None else f"{damping:.6g}, filtered"
        origin = Origin.of(
            sides.problem, measured=measured, damping=added, curvature="Gauss-Newton", solver=solver
        )
    return Influence(sides.scores(solution.x), solution, sides.solved_for, sides.points, origin)


def saving(
    solver: Solver, callback: Callable[[Any], object] | None, checkpoint: str | Path | Checkpoint | None
) -> Solver:
    """Return the solver with this callback and checkpoint, beside which it has none of its own."""
    given = {"callback": callback, "checkpoint": checkpoint}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not isinstance(solver, IterativeSolver):
        raise ValueError(f"{type(solver).__name__} takes no steps: leave {' and '.join(given)} out")
    if any(getattr(solver, name) is not None for name in given):
        raise ValueError(f"the solver has its own {' and '.join(given)}: give them in one place")
    return replace(solver, **given) if given else solver  # type: ignore[type-var]


def warn_unless_converged(solution: Solution) -> None:
    """Warn where the residual behind the scores is too large: at the user's line, four calls up."""
    if not solution.converged:
        warnings.warn(
            "the solver did not reach its tolerance: largest relative residual "
            f"{float(solution.residual.max()):.2g}. Allow more steps, raise the damping, or read the scores "
            "with that error in mind.",
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Sides:
    """The systems to solve, and what scores are taken from their solutions.

    Attributes:
        matrix: G.
        solved: (P, K), gradients of one side's examples.
        solved_for: which side's, "points" or "test".
        scores: (P, K) -> (num_test, num_points).
        points: as of `Influence`.
        problem: model, loss and training set; None over processes.
    """

    matrix: LinearOperator
    solved: Tensor
    solved_for: str
    scores: Callable[[Tensor], Tensor]
    points: Tensor | None = None
    problem: Problem | None = None


def _on_one_process(
    problem: Problem,
    test: Data,
    *,
    points: Tensor | Sequence[int] | None,
    candidates: Data | None,
    measurement: Measurement | None,
    batch_size: int | None,
) -> _Sides:
    """Return the systems of the side that has fewer examples."""
    tested, size = problem.with_data(test), DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    if candidates is not None:
        sources, chosen = problem.with_data(candidates, name="candidates"), None
        num_sources = sources.num_examples
    else:
        sources, chosen = sources_of(problem, points)
        num_sources = len(chosen)

    def along(of: Problem, directions: Tensor, measured: Measurement | None) -> Tensor:
        return -directional_derivatives(of, directions=directions, measurement=measured, batch_size=size)

    matrix = GaussNewtonOperator(problem)
    if num_sources <= tested.num_examples:
        solved = per_example_gradients(sources).T
        return _Sides(matrix, solved, "points", lambda x: along(tested, x, measurement), chosen, problem)
    solved = per_example_gradients(tested, measurement=measurement).T
    return _Sides(matrix, solved, "test", lambda x: along(sources, x, None).T, chosen, problem)


def _over_processes(
    operator: OverProcesses, test: Data, *, measurement: Measurement | None, weights: Tensor | None
) -> _Sides:
    """Return the systems of the test examples, which all processes solve together."""
    given = torch.tensor(weights is None)
    operator.ranks.agree(given, "whether they have weights: pass each rank those of its own examples")
    matrix = cast("LinearOperator", operator) if weights is None else operator.weighted(weights)
    solved = operator.example_gradients(test, measurement)
    return _Sides(matrix, solved, "test", lambda x: -operator.example_derivatives(x).T)


def check_run(run: TrainingHistory | RunLength | TrainingRun | None, problem: Problem) -> None:
    """Raise a ValueError where a recorded run is of a model of another size, or of other data; others pass."""
    recorded = run.run if isinstance(run, TrainingHistory) else run
    if not isinstance(recorded, TrainingRun):
        return
    whole = sum(parameter.numel() for parameter in problem.model.parameters())
    if len(recorded.start) not in (problem.num_parameters, whole):  # some may have been frozen since
        raise ValueError(
            f"the run trained {len(recorded.start):,} parameters, the model has {problem.num_parameters:,} that "
            "require gradients: pass the model that it trained; for the run's damping alone, pass its length, "
            "run=RunLength.of(run)"
        )
    recorded.check_data(lambda index: problem.data.select(index)[0], problem.num_examples, problem.dtype)


def curvature_added(
    damping: float | None,
    run: TrainingHistory | RunLength | TrainingRun | None,
    retraining: Retraining | None,
    *,
    filtered: bool,
) -> tuple[float, float | None]:
    """Return what is added to G, and the time of the filter; None for the damped inverse."""
    if (damping is None) == (run is None):
        raise ValueError(
            "give either damping, or the run that trained the model (what curvlab.training.train returned, or "
            "RunLength), which sets it to 1 / (learning rate x steps)"
        )
    if not isinstance(retraining, Retraining | None):
        raise TypeError(f"retraining is a curvlab.influence.Retraining, got {retraining!r}")
    if run is not None:
        length = RunLength.of(run)
        time = (retraining or Retraining.as_many_steps()).time(length)
        return (length.weight_decay, time) if filtered else (length.weight_decay + 1 / time, None)
    if retraining is not None:
        raise ValueError(
            "retraining says how long it is beside the run: pass run too, or damping = 1 / length alone"
        )
    if filtered:
        raise ValueError("filtered=True needs the run whose filter it is: pass run instead of damping")
    why = (
        "the Gauss-Newton matrix of a network is singular. The paper takes about lambda_max / 54, and `run` sets "
        "it by the length of the training."
    )
    return positive("damping", damping, why), None


# --------------------------------------------------------------------------- two sets of scores
# The cases of Klochkov & Liu (2024), Sec. 4, with thresholds fixed before any run: the paper gives none.
NEAR_ZERO = 0.1  # both root mean squares below this share of the median panel's
MIN_PEARSON = 0.9
SLOPES = (0.5, 2.0)


@dataclass(frozen=True)
class Agreement:
    """Comparison of y with x over the test points of one training point.

    Attributes:
        pearson: correlation of x and y; nan when one is constant.
        slope: of the least-squares line y = a + slope·x; 1 when the scores agree.
        relative_error: ‖y - x‖ / ‖x‖.
        case: "both near zero" (both root mean squares below a tenth of `scale`), else "agree" (pearson >= 0.9,
            slope within a factor of 2 of 1), else "apart".
    """

    pearson: float
    slope: float
    relative_error: float
    case: str


def agreement(x: Tensor, y: Tensor, *, scale: float) -> Agreement:
    """Compare two (num_test,) score vectors; `scale` is the root mean square of a typical panel."""
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"need two vectors of one length, got {tuple(x.shape)} and {tuple(y.shape)}")
    x, y = x.double(), y.double()
    dx, dy = x - x.mean(), y - y.mean()
    pearson = float((dx @ dy) / (dx.norm() * dy.norm()))
    slope = float((dx @ dy) / (dx @ dx))
    largest = max(float(x.square().mean().sqrt()), float(y.square().mean().sqrt()))
    if largest < NEAR_ZERO * scale:
        case = "both near zero"
    elif pearson >= MIN_PEARSON and SLOPES[0] <= slope <= SLOPES[1]:
        case = "agree"
    else:
        case = "apart"
    return Agreement(pearson=pearson, slope=slope, relative_error=float((y - x).norm() / x.norm()), case=case)


def median_rms(*scores: Tensor) -> float:
    """Return the median root mean square over all finite columns of several (num_test, num_points) matrices.

    The median, because a single diverged column would set a maximum or a mean.
    """
    columns = torch.cat([tensor("scores", matrix).double().square().mean(0).sqrt() for matrix in scores])
    return float(columns[columns.isfinite()].median())
