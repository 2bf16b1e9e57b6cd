"""Newton's method with cubic regularisation, dense: the reference that cheaper methods are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.linalg import LinearOperator
from curvlab.optim.flat import (
    Closure,
    VectorOptimizer,
    check_size,
    evaluate,
    gradient_vector,
    move,
    single_group,
)


class CubicNewton(VectorOptimizer):
    """x <- x + lr argmin_h ∇fᵀh + ½ hᵀHh + M/6 ‖h‖³ (Nesterov & Polyak 2006); M = 0 is Newton's method.

    The minimiser is h = -(H + M r/2 I)⁻¹ ∇f with r = ‖h‖; r is found by bisection on the eigenvalues of H. The
    hard case, a gradient without any part along the most negative curvature, is not treated: the step is then
    the limit without that part.

    Args:
        params: all parameters that require gradients, in the order of `hessian`; one group.
        hessian: H at the parameters' current values.
        lr: factor of the step; 1 is the method.
        hessian_lipschitz: M.
        max_size: refuse more parameters than this: H is formed, (n, n).

    Cost of a step: n products and an eigendecomposition, O(n³).
    """

    attributes = ("hessian", "num_matvecs")

    def __init__(
        self,
        params: ParamsT,
        hessian: LinearOperator,
        *,
        lr: float = 1.0,
        hessian_lipschitz: float = 0.0,
        max_size: int = 2000,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}; 1 is the method")
        if not hessian_lipschitz >= 0:
            raise ValueError(f"hessian_lipschitz must not be negative, got {hessian_lipschitz}")
        if hessian.shape[0] > max_size:
            raise ValueError(
                f"CubicNewton forms the ({hessian.shape[0]}, {hessian.shape[0]}) Hessian, more than max_size = "
                f"{max_size}: use UniformDirection or FisherNewton, or raise max_size if the memory is there."
            )
        super().__init__(params, {"lr": lr, "hessian_lipschitz": hessian_lipschitz})
        check_size(single_group(self.param_groups, name="CubicNewton"), hessian, name="CubicNewton")
        self.hessian = hessian
        self.num_matvecs = 0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | float | None:  # type: ignore[override]
        """Take one step; return the closure's loss. The closure is as for UniformDirection."""
        loss = evaluate(closure)
        group = single_group(self.param_groups, name="CubicNewton")
        gradient = gradient_vector(group, name="CubicNewton")
        dense = self.hessian.to_dense()
        self.num_matvecs += len(dense)
        eigenvalues, vectors = torch.linalg.eigh((dense + dense.T) / 2)
        step = _regularised(eigenvalues, vectors.T @ gradient, group["hessian_lipschitz"])
        move(group, -group["lr"] * (vectors @ step))
        return loss


def _regularised(eigenvalues: Tensor, gradient: Tensor, lipschitz: float) -> Tensor:
    """Return (Λ + M r/2)⁻¹ g with r its own norm, in eigencoordinates."""
    if lipschitz == 0:
        return gradient / eigenvalues

    def step(radius: float) -> Tensor:
        return gradient / (eigenvalues + lipschitz * radius / 2)

    # ‖step(r)‖ - r falls in r where all denominators are positive; at `high` it is negative.
    low = max(0.0, -2 * float(eigenvalues[0]) / lipschitz)
    high = low + math.sqrt(2 * float(gradient.norm()) / lipschitz) + 1e-300
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float(step(middle).norm()) > middle else (low, middle)
    return step(high)
