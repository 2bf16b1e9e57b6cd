"""Influence of training points on test points through the damped inverse Gauss-Newton matrix."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.example_derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import identity
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
    model: nn.Module,
    loss: Loss,
    train: Data,
    test: Data,
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
    model: nn.Module,
    loss: Loss,
    train: Data,
    test: Data,
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
        model: in eval mode.
        loss: as for DataOperator: with a closed form, or any mean over examples of the user's own. With class
            weights l(z) is z's term of the mean training loss: its weight, over the training set's mean weight,
            times its cross-entropy; so it is for the test loss, unless there is a measurement.
        train: data whose mean Gauss-Newton matrix is G, in any form that `Batches` takes.
        test: examples that are measured, likewise.
        points: training examples whose influence is asked for; `train` by default. Rows and columns are in the
            order of the data; of a loader that shuffles, in that of its data set.
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
            out is a weight of -w_i/N.
        generator: of the solver's random numbers; by default seeded with 0 for every call.

    One system is solved for each example of the smaller side; the other side costs one directional derivative a
    system and no per-example gradients. A warning tells when the solver did not converge.
    """
    damping, time = _curvature_added(damping, run, filtered=filtered)
    if solver is not None and rtol is not None:
        raise ValueError("rtol is that of the default solver: give it to the solver instead.")
    if solver is not None and filtered:
        raise ValueError("filtered=True has a solver of its own, TrainingFilter: leave one of the two out.")
    op = GaussNewtonOperator(model, loss, train, batch_size=batch_size, memory_budget=memory_budget)
    matrix = op if weights is None else op.weighted(weights)
    batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    loss = of_mean_weight_one(loss, (targets for _, targets in op.batches))
    sources = train if points is None else points

    def size(data: Data) -> int:
        return Batches.of(op.function, data, batch_size=batch_size).num_examples

    by_point = size(sources) <= size(test)
    if by_point:
        rhs = per_example_gradients(model, loss, sources)
    else:
        rhs = per_example_gradients(model, loss, test, measurement=measurement)
    damped, rtol = matrix + damping * identity, 1e-2 if rtol is None else rtol
    if time is not None:
        solver = TrainingFilter(time, rtol=rtol)
    elif solver is None:
        solver = default_solver(op.shape[0], len(rhs), rtol=rtol, operator=damped)
    if generator is None:
        generator = torch.Generator(op.device).manual_seed(0)
    solution = solver.solve(damped, rhs.T, generator=generator)
    measured, of = (test, measurement) if by_point else (sources, None)
    at_once = op.problem.memory.examples_at_once(batch_size)
    scores = -directional_derivatives(model, loss, measured, solution.x, measurement=of, batch_size=at_once)
    if not by_point:
        scores = scores.T
    if not solution.converged:
        warnings.warn(
            "the solver did not reach its tolerance: largest relative residual "
            f"{float(solution.residual.max()):.2g}. Allow more steps, raise the damping, or read the scores "
            "with that error in mind.",
            stacklevel=2,
        )
    return Influence(scores=scores, solution=solution, solved_for="points" if by_point else "test")


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
