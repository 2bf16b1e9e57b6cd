"""What retraining does: the responses of Bae et al. (2022), Sec. C.2 and D.2, and those of single points.

The responses to leaving groups out are displacements from θ^s, (K, P), one for each group. θ^s was trained for K
epochs; the minimiser brings the batches of the retraining, K/2 epochs of them for all but the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from curvlab.arguments import tensor
from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.curvature.linearise import use_vmap
from curvlab.influence.derivatives import Measurement
from curvlab.influence.retraining.minimise import Minimizer, ProximalOptimizer
from curvlab.influence.retraining.objective import (
    DownweightedCost,
    LeftOut,
    LinearisedProximalBregmanCost,
    ProximalBregmanCost,
    ProximalCost,
)
from curvlab.influence.retraining.points import ProximalBregmanObjective, per_point
from curvlab.linalg import LinearOperator, flatten, identity, unflatten, unflatten_columns
from curvlab.problem import Data, Loss, ModelFunction, Problem
from curvlab.problem.batch import Inputs
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.solvers import Solution, Solver

Curvature = Literal["gauss_newton", "hessian"]


# ------------------------------------------------------------------------------- groups left out
def cold_optimum(left_out: LeftOut, minimizer: Minimizer, *, initial: Tensor) -> Tensor:
    """1. Retrain from the initial parameters θ⁰, (P,): K epochs in the base run's batches, then K/2 more."""
    objective = DownweightedCost(left_out, origin=initial)
    return _minimum(objective, minimizer) + (objective.origin - left_out.base)


def warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """2. Retrain from θ^s for K/2 epochs."""
    return _minimum(DownweightedCost(left_out), minimizer)


def proximal_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """3. Retrain from θ^s for K/2 epochs with the objective of Eq. 7."""
    return _minimum(ProximalCost(left_out), minimizer)


def proximal_bregman_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """4. Retrain from θ^s for K/2 epochs with the objective of Eq. 8, at a tenth of the learning rate."""
    return _minimum(ProximalBregmanCost(left_out), minimizer)


def linearised_proximal_bregman_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """5. Retrain from θ^s for K/2 epochs with the objective of Eq. 10, at a tenth of the learning rate."""
    return _minimum(LinearisedProximalBregmanCost(left_out), minimizer)


RETRAINED = {
    "warm": warm_optimum,
    "proximal": proximal_warm_optimum,
    "proximal_bregman": proximal_bregman_warm_optimum,
    "linearised": linearised_proximal_bregman_warm_optimum,
}


def _minimum(objective: DownweightedCost, minimizer: Minimizer) -> Tensor:
    return minimizer(objective, objective.left_out.zeros, objective.left_out.num_examples)


def influence_estimate(
    left_out: LeftOut,
    solver: Solver,
    *,
    curvature: Curvature = "gauss_newton",
    generator: torch.Generator | int | None = None,
) -> tuple[Tensor, Solution]:
    """6. -(G + (λ + l2) I)⁻¹ sum_i (w_ki - 1)/N ∇l_i (Eq. 46; Eq. 27 with the Hessian), and its residuals.

    For a single z that is +1/N (G + ...)⁻¹ ∇l(z), as in Eq. 19. G is the Gauss-Newton matrix at θ^s.
    """
    operator = curvature_operator(left_out, curvature)
    solution = solver.solve(operator, -left_out.pull.T, generator=generator_of(generator, operator.device))
    return solution.x.T.contiguous(), solution


def two_stage_optimum(warm: Tensor, warm_full: Tensor) -> Tensor:
    """D.2. θ^s moved by the difference of two retrainings in the same batches, without the group and with it.

    Args:
        warm: of `warm_optimum`, (K, P).
        warm_full: the same with nothing left out (an empty group), (P,).
    """
    return warm - warm_full


def curvature_operator(left_out: LeftOut, curvature: Curvature) -> LinearOperator:
    """Return G + (λ + l2) I at θ^s, or H + (λ + l2) I."""
    operators = {"gauss_newton": GaussNewtonOperator, "hessian": HessianOperator}
    if curvature not in operators:
        raise ValueError(f"unknown curvature '{curvature}': choose gauss_newton or hessian")
    return operators[curvature](left_out.problem) + left_out.strength * identity


# -------------------------------------------------------------------------------- single points
@can_be_silent
def proximal_bregman_response(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train: Data | None = None,
    points: Tensor | Sequence[int] | None = None,
    *,
    candidates: Data | None = None,
    damping: float,
    epsilon: float | Tensor,
    optimizer: ProximalOptimizer,
    batch_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    weights: Tensor | None = None,
    progress: bool = True,
    generator: torch.Generator | int | None = None,
) -> Tensor:
    """Return (θ(ε) - θ*) / ε for each point, (P, num_points); to first order -(G + damping I)⁻¹ ∇l(z).

    See `ProximalBregmanObjective` for the objective, its arguments and its sign, ProximalSGD and ProximalNewton
    for the optimisers (the latter is exact), whose bar progress=False silences. `loss_response` turns the
    displacement into changes of test losses.
    """
    objective = ProximalBregmanObjective(
        model,
        loss,
        train,
        points,
        candidates=candidates,
        damping=damping,
        epsilon=epsilon,
        batch_size=batch_size,
        dtype=dtype,
        weights=weights,
    )
    if isinstance(optimizer, type) or not hasattr(optimizer, "minimize"):
        raise TypeError(
            f"optimizer is a ProximalSGD(...) or ProximalNewton(...) of curvlab.influence, got {optimizer!r}"
        )
    response = optimizer.minimize(objective, generator=generator)
    if response.gradient_norm.isfinite().all() and not response.converged:
        worst = int(response.gradient_norm.argmax())
        largest, weight = float(response.gradient_norm[worst]), abs(float(objective.epsilon[worst]))
        advice = "Allow more steps, or take a smaller epsilon."
        if largest <= torch.finfo(dtype).eps / weight:  # rounding leaves less: 0.08 to 0.3 of it, as measured
            advice = f"Rounding hides the rest at epsilon = {weight:.1g} in {dtype}: take a larger epsilon"
            advice += "." if dtype == torch.float64 else ", or dtype=torch.float64."
        warnings.warn(
            f"the proximal objective was not minimised: largest relative gradient norm {largest:.2g}. {advice}",
            stacklevel=3,
        )
    return response.displacement


@can_be_silent
def loss_response(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    test: Data | None = None,
    displacement: Tensor | None = None,
    *,
    epsilon: float | Tensor,
    batch_size: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Return [l(test; θ* + εu) - l(test; θ*)] / ε for each test example and column of u, (num_test, K).

    The finite change of the test losses, not its linearisation: what retraining does to them, per unit of ε. In
    the displacement's dtype; with ε = 1e-8 in double precision its rounding error is about 1e-8 of the loss.
    `epsilon` is the objective's: a number, or (K,), one for each column. A `Problem` may stand in the place of
    model, loss and test.
    Cost: 1F a column.
    """
    if displacement is None:
        raise TypeError("pass displacement=..., u, (P, K)")
    problem = Problem.of(model, loss, test, batch_size=batch_size)
    tensor("displacement", displacement, ndim=2, shape="(P, K)", rows=problem.num_parameters)
    problem = problem.copied(displacement.dtype)
    start = flatten(problem.parameters)[:, None]
    weights = per_point(epsilon, displacement.shape[1]).to(displacement)
    moved = start + weights * displacement

    def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> Tensor:
        before, after = (
            of_copies(problem, places, inputs, targets, problem.loss.own_loss) for places in (start, moved)
        )
        return ((after - before) / weights[:, None]).T

    return torch.cat(list(problem.map(of_batch, name="changes of losses")))


@torch.no_grad()
def of_copies(
    problem: Problem, positions: Tensor, inputs: Inputs, targets: Tensor, measure: Measurement
) -> Tensor:
    """Return what copies of a model measure on a batch, (P, K) -> (K, ...), once its targets are known to fit.

    Cost: a forward for each copy.
    """
    outputs = outputs_of_copies(problem.function, positions, inputs)
    problem.loss.check(outputs[0], targets)
    return torch.stack([measure(each, targets) for each in outputs])


@torch.no_grad()
def outputs_of_copies(function: ModelFunction, positions: Tensor, inputs: Inputs) -> Tensor:
    """Return the outputs of copies of a model, (P, K) -> (K, B, ...)."""

    def of_one(*values: Tensor) -> Tensor:
        return function(values, inputs)

    if positions.shape[1] > 1 and use_vmap(function, "auto", inputs):
        return vmap(of_one)(*unflatten_columns(positions, function.live_parameters))
    return torch.stack([of_one(*unflatten(column, function.live_parameters)) for column in positions.unbind(1)])
