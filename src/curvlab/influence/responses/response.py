"""The six responses of Bae et al. (2022), Sec. C.2, in the order in which they stand there, and that of D.2.

All are displacements from θ^s, (K, P), one for each group that is left out. θ^s was trained for K epochs; the
minimiser brings the batches of the retraining, K/2 epochs of them for all but the first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.influence.responses.left_out import LeftOut
from curvlab.influence.responses.minimizers import Minimizer
from curvlab.influence.responses.objectives import (
    DownweightedCost,
    LinearisedProximalBregmanCost,
    ProximalBregmanCost,
    ProximalCost,
)
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import Solution, Solver

Curvature = Literal["gauss_newton", "hessian"]


def cold_optimum(left_out: LeftOut, minimizer: Minimizer, *, initial: Tensor) -> Tensor:
    """1. Retrain from the initial parameters θ⁰, (P,): K epochs in the base run's batches, then K/2 more."""
    objective = DownweightedCost(left_out, origin=initial)
    moved = minimizer(objective, _zeros(left_out), left_out.num_examples)
    return moved + (objective.origin - left_out.base)


def warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """2. Retrain from θ^s for K/2 epochs."""
    return minimizer(DownweightedCost(left_out), _zeros(left_out), left_out.num_examples)


def proximal_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """3. Retrain from θ^s for K/2 epochs with the objective of Eq. 7."""
    return minimizer(ProximalCost(left_out), _zeros(left_out), left_out.num_examples)


def proximal_bregman_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """4. Retrain from θ^s for K/2 epochs with the objective of Eq. 8, at a tenth of the learning rate."""
    return minimizer(ProximalBregmanCost(left_out), _zeros(left_out), left_out.num_examples)


def linearised_proximal_bregman_warm_optimum(left_out: LeftOut, minimizer: Minimizer) -> Tensor:
    """5. Retrain from θ^s for K/2 epochs with the objective of Eq. 10, at a tenth of the learning rate."""
    return minimizer(LinearisedProximalBregmanCost(left_out), _zeros(left_out), left_out.num_examples)


def influence_estimate(
    left_out: LeftOut,
    solver: Solver,
    *,
    curvature: Curvature = "gauss_newton",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Solution]:
    """6. -(G + (λ + l2) I)⁻¹ sum_i (w_ki - 1)/N ∇l_i (Eq. 46; Eq. 27 with the Hessian), and its residuals.

    For a single z that is +1/N (G + ...)⁻¹ ∇l(z), as in Eq. 19. G is the Gauss-Newton matrix at θ^s.
    """
    solution = solver.solve(curvature_operator(left_out, curvature), -left_out.pull.T, generator=generator)
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
    operator = operators[curvature](left_out.model, left_out.loss, left_out.train)
    return operator + (left_out.damping + left_out.l2) * identity


def _zeros(left_out: LeftOut) -> Tensor:
    return torch.zeros(
        len(left_out.groups), len(left_out.base), dtype=left_out.base.dtype, device=left_out.base.device
    )
