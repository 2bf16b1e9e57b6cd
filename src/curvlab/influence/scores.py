"""Influence of training points on test points through the damped inverse Gauss-Newton matrix."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.curvature import Batches, Data, GaussNewtonOperator
from curvlab.influence.example_derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import identity
from curvlab.solvers import Solution, Solver, default_solver


@dataclass(frozen=True)
class Influence:
    """Scores with the solution behind them.

    Attributes:
        scores: (num_test, num_points).
        solution: of (G + damping I) X = B; residual per right-hand side.
        solved_for: which side's gradients B holds: the smaller one.
    """

    scores: Tensor
    solution: Solution
    solved_for: str


def influence_scores(
    model: nn.Module,
    loss: nn.Module,
    train: Data,
    test: Data,
    *,
    points: Data | None = None,
    damping: float,
    solver: Solver | None = None,
    rtol: float | None = None,
    measurement: Measurement | None = None,
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
        solver=solver,
        rtol=rtol,
        measurement=measurement,
        generator=generator,
    ).scores


def influence(
    model: nn.Module,
    loss: nn.Module,
    train: Data,
    test: Data,
    *,
    points: Data | None = None,
    damping: float,
    solver: Solver | None = None,
    rtol: float | None = None,
    measurement: Measurement | None = None,
    batch_size: int = 512,
    generator: torch.Generator | None = None,
) -> Influence:
    """Return -∇m(test)ᵀ (G + damping I)⁻¹ ∇l(z) for every test example and point z, with its residuals.

    The first-order change of the test measurement m (default: the loss, so a helpful point scores negative) per
    unit of weight that is added to z's loss in the mean training loss (Koh & Liang 2017; Klochkov & Liu 2024,
    Sec. 2, with f = -l). Leaving one of N points out is a weight of -1/N.

    Args:
        model: in eval mode.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss.
        train: data whose mean Gauss-Newton matrix is G.
        test: examples that are measured.
        points: training examples whose influence is asked for; `train` by default.
        damping: added to G once; positive.
        solver: any of curvlab.solvers; by default `default_solver`, which takes all right-hand sides together, and
            states its memory.
        rtol: residual of the default solver, 1e-2; with a `solver`, it has its own.
        measurement: (outputs, targets) -> (N,), one number for each test example.
        batch_size: examples at a time.
        generator: of the solver's random numbers; by default seeded with 0 for every call.

    One system is solved for each example of the smaller side; the other side costs one directional derivative a
    system and no per-example gradients. A warning tells when the solver did not converge.
    """
    if not damping > 0:
        raise ValueError(
            f"damping must be positive, got {damping}: the Gauss-Newton matrix of a network is singular. "
            "The paper takes about lambda_max / 54."
        )
    if solver is not None and rtol is not None:
        raise ValueError("rtol is that of the default solver: give it to the solver instead.")
    op = GaussNewtonOperator(model, loss, train, batch_size=batch_size)
    sources = train if points is None else points

    def size(data: Data) -> int:
        return Batches(data, batch_size=batch_size, device=op.device, dtype=op.dtype).num_examples

    by_point = size(sources) <= size(test)
    if by_point:
        rhs = per_example_gradients(model, loss, sources)
    else:
        rhs = per_example_gradients(model, loss, test, measurement=measurement)
    if solver is None:
        solver = default_solver(op.shape[0], len(rhs), rtol=1e-2 if rtol is None else rtol)
    if generator is None:
        generator = torch.Generator(op.device).manual_seed(0)
    solution = solver.solve(op + damping * identity, rhs.T, generator=generator)
    if by_point:
        scores = -directional_derivatives(
            model, loss, test, solution.x, measurement=measurement, batch_size=batch_size
        )
    else:
        scores = -directional_derivatives(model, loss, sources, solution.x, batch_size=batch_size).T
    if not solution.converged:
        warnings.warn(
            "the solver did not reach its tolerance: largest relative residual "
            f"{float(solution.residual.max()):.2g}. Allow more steps, raise the damping, or read the scores "
            "with that error in mind.",
            stacklevel=2,
        )
    return Influence(scores=scores, solution=solution, solved_for="points" if by_point else "test")
