"""Influence of training points on test points through the damped inverse Gauss-Newton matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.example_derivatives import (
    Measurement,
    OverProcesses,
    directional_derivatives,
    per_example_gradients,
)
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Batches, Data, Loss
from curvlab.problem.known_losses import of_mean_weight_one
from curvlab.problem.problem import DEFAULT_BATCH_SIZE
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import Solution, Solver, TrainingFilter, default_solver
from curvlab.training import RunLength, TrainingHistory, TrainingRun


@dataclass(frozen=True, repr=False)
class Influence(Shown):
    """Scores with the solution behind them.

    Attributes:
        scores: (num_test, num_points).
        solution: of (G + damping I) X = B, or what the filter gives; residual per right-hand side.
        solved_for: which side's gradients B holds: the smaller one.
    """

    scores: Tensor
    solution: Solution
    solved_for: str

    def summary(self) -> Summary:
        """Return the range of the scores, and the solution's residual, cost and problems."""
        behind, (tests, points) = self.solution.summary(), self.scores.shape
        low, high = (float(self.scores.min()), float(self.scores.max())) if self.scores.numel() else (0.0, 0.0)
        return Summary(
            "influence scores",
            f"from {low:.3g} to {high:.3g}",
            f"{counted(tests, 'test example')} x {counted(points, 'point')}; residual {behind.value}",
            (*behind.cost, f"one system for each of the {self.solved_for}"),
            behind.problems,
        )


def influence_scores(
    model: nn.Module | OverProcesses,
    loss: Loss | None = None,
    train: Data | None = None,
    test: Data | None = None,
    *,
    points: Data | None = None,
    damping: float | None = None,
    run: TrainingHistory | RunLength | TrainingRun | None = None,
    filtered: bool = False,
    solver: Solver | None = None,
    rtol: float | None = None,
    measurement: Measurement | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the influence of `points` on `test`, (num_test, num_points); see `influence` for all about it."""
    return influence(
        model,
        loss,
        train,
        test,
        points=points,
        damping=damping,
        run=run,
        filtered=filtered,
        solver=solver,
        rtol=rtol,
        measurement=measurement,
        weights=weights,
        generator=generator,
    ).scores


def influence(
    model: nn.Module | OverProcesses,
    loss: Loss | None = None,
    train: Data | None = None,
    test: Data | None = None,
    *,
    points: Data | None = None,
    damping: float | None = None,
    run: TrainingHistory | RunLength | TrainingRun | None = None,
    filtered: bool = False,
    solver: Solver | None = None,
    rtol: float | None = None,
    measurement: Measurement | None = None,
    batch_size: int | None = None,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Influence:
    """Return -∇m(test)ᵀ (G + damping I)⁻¹ ∇l(z) for every test example and point z, with its residuals.

    The first-order change of the test measurement m (default: the loss, so a helpful point scores negative) per
    unit of weight that is added to z's loss in the mean training loss (Koh & Liang 2017; Klochkov & Liu 2024,
    Sec. 2, with f = -l). Leaving one of N points out is a weight of -1/N.

    Args:
        model: in eval mode. Or, in the place of model, loss and train, an operator of curvlab.parallel: all its
            processes solve together, each scores its own training examples, and all get the scores of all, in the
            order of the processes. Then pass `test` by name, the same on every process, and no points.
        loss: as for DataOperator: with a closed form, or any mean over examples of the user's own. With class
            weights l(z) is z's term of the mean training loss: its weight, over the training set's mean weight,
            times its cross-entropy; so it is for the test loss, unless there is a measurement.
        train: data whose mean Gauss-Newton matrix is G, in any form that `Batches` takes.
        test: examples that are measured, likewise.
        points: training examples whose influence is asked for; `train` by default. Rows and columns are in the
            order of the data.
        damping: added to G once; positive. Or
        run: the training that led to `model`, by SGD: what `train` returned, or RunLength with the learning rates,
            momentum and weight decay of a loop of one's own. The damping is then weight decay + 1 / (ηT), with
            η / (1 - momentum) for η, less what momentum from rest has not yet carried along (`RunLength.time`;
            nothing to speak of in long runs): curvature that a run of that length cannot resolve.
        filtered: with `run`, the filter (1 - e^{-ηTμ}) / μ of the run itself (`TrainingFilter`) in the place of
            the damped inverse 1 / (μ + damping) that imitates it.
        solver: any of curvlab.solvers; by default `default_solver`, which takes all right-hand sides together,
            looks whether few examples hold most of the curvature (one forward of the data), and states its memory.
        rtol: residual of the default solver, or of the filter, 1e-2; with a `solver`, it has its own.
        measurement: (outputs, targets) -> (N,), one number for each test example.
        batch_size: examples at a time, 512 by default; fewer where memory asks for it.
        memory_budget: bytes for each pass, see curvlab.curvature.DataOperator.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: G is
            then `GaussNewtonOperator.weighted`. Scores stay per unit of weight added to l(z), so leaving example i
            out is a weight of -w_i/N. With an operator over processes those of this process's examples.
        generator: of the solver's random numbers; by default seeded with 0 for every call.

    One system is solved for each example of the smaller side; the other side costs one directional derivative a
    system and no per-example gradients. A warning tells when the solver did not converge.
    """
    damping, time = _curvature_added(damping, run, filtered=filtered)
    if solver is not None and rtol is not None:
        raise ValueError("rtol is that of the default solver: give it to the solver instead.")
    if solver is not None and filtered:
        raise ValueError("filtered=True has a solver of its own, TrainingFilter: leave one of the two out.")
    if isinstance(model, nn.Module):
        sides = _on_one_process(
            model,
            loss,
            train,
            test,
            points=points,
            measurement=measurement,
            batch_size=batch_size,
            memory_budget=memory_budget,
            weights=weights,
        )
    elif any(given is not None for given in (loss, train, points, batch_size, memory_budget)) or test is None:
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
    if generator is None:
        generator = torch.Generator(damped.device).manual_seed(0)
    solution = solver.solve(damped, sides.solved, generator=generator)
    if not solution.converged:
        warnings.warn(
            "the solver did not reach its tolerance: largest relative residual "
            f"{float(solution.residual.max()):.2g}. Allow more steps, raise the damping, or read the scores "
            "with that error in mind.",
            stacklevel=2,
        )
    return Influence(scores=sides.scores(solution.x), solution=solution, solved_for=sides.solved_for)


@dataclass(frozen=True)
class _Sides:
    """The systems to solve, and what scores are taken from their solutions.

    Attributes:
        matrix: G.
        solved: (P, K), gradients of one side's examples.
        solved_for: which side's, "points" or "test".
        scores: (P, K) -> (num_test, num_points).
    """

    matrix: LinearOperator
    solved: Tensor
    solved_for: str
    scores: Callable[[Tensor], Tensor]


def _on_one_process(
    model: nn.Module,
    loss: Loss | None,
    train: Data | None,
    test: Data | None,
    *,
    points: Data | None,
    measurement: Measurement | None,
    batch_size: int | None,
    memory_budget: float | None,
    weights: Tensor | None,
) -> _Sides:
    """Return the systems of the side that has fewer examples."""
    if loss is None or train is None or test is None:
        raise TypeError("pass model, loss, train and test, or an operator over processes and test=...")
    op = GaussNewtonOperator(model, loss, train, batch_size=batch_size, memory_budget=memory_budget)
    size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    matrix = op if weights is None else op.weighted(weights)
    unit = of_mean_weight_one(loss, (targets for _, targets in op.batches))
    sources = train if points is None else points

    def num(data: Data) -> int:
        return Batches.of(op.function, data, batch_size=size).num_examples

    def along(data: Data, directions: Tensor, of: Measurement | None) -> Tensor:
        at_once = op.problem.memory.examples_at_once(size)
        return -directional_derivatives(model, unit, data, directions, measurement=of, batch_size=at_once)

    if num(sources) <= num(test):
        solved = per_example_gradients(model, unit, sources).T
        return _Sides(matrix, solved, "points", lambda x: along(test, x, measurement))
    solved = per_example_gradients(model, unit, test, measurement=measurement).T
    return _Sides(matrix, solved, "test", lambda x: along(sources, x, None).T)


def _over_processes(
    operator: OverProcesses, test: Data, *, measurement: Measurement | None, weights: Tensor | None
) -> _Sides:
    """Return the systems of the test examples, which all processes solve together."""
    given = torch.tensor(weights is None)
    operator.ranks.agree(given, "whether they have weights: pass each rank those of its own examples")
    matrix = cast("LinearOperator", operator) if weights is None else operator.weighted(weights)
    solved = operator.example_gradients(test, measurement)
    return _Sides(matrix, solved, "test", lambda x: -operator.example_derivatives(x).T)


def _curvature_added(
    damping: float | None, run: TrainingHistory | RunLength | TrainingRun | None, *, filtered: bool
) -> tuple[float, float | None]:
    """Return what is added to G, and the time of the filter; None for the damped inverse."""
    if (damping is None) == (run is None):
        raise ValueError(
            "give either damping, or the run that trained the model (what curvlab.training.train returned, or "
            "RunLength), which sets it to 1 / (learning rate x steps)"
        )
    if run is not None:
        length = RunLength.of(run)
        return (length.weight_decay, length.time) if filtered else (length.damping, None)
    if filtered:
        raise ValueError("filtered=True needs the run whose filter it is: pass run instead of damping")
    if damping is None or not damping > 0:
        raise ValueError(
            f"damping must be positive, got {damping}: the Gauss-Newton matrix of a network is singular. "
            "The paper takes about lambda_max / 54, and `run` sets it by the length of the training."
        )
    return damping, None
