"""The rank-one estimate of a Hessian from one random direction, and how far it is from the Hessian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.optim.low_rank import LowRankMatrix


def unit_directions(operator: LinearOperator, count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return directions drawn uniformly from the unit sphere, (n, count)."""
    drawn = operator.randn(count, generator)
    return drawn / operator.norm(drawn)


def direction_estimate(hessian: LinearOperator, directions: Tensor, *, symmetrize: bool = True) -> LowRankMatrix:
    """Return the mean over directions u of S = n/2 (H u uᵀ + u uᵀ H), or of D = n H u uᵀ (Semenov 2025).

    E[D] = E[S] = H for u uniform on the unit sphere. D is not symmetric; neither is positive semi-definite, also
    where H is: the eigenvalues of S are n/2 (uᵀHu ± ‖Hu‖) and zeros.

    Args:
        hessian: H, (n, n), symmetric.
        directions: unit vectors, (n, m).
        symmetrize: S, or else D.

    Cost: m products, O(n m²).
    """
    products = hessian @ directions
    num_parameters, num_directions = directions.shape
    scale = num_parameters / num_directions
    span = torch.cat([directions, products], dim=1)
    if not symmetrize:
        return LowRankMatrix.from_factors(scale * products, directions, span)
    right = torch.cat([directions, products], dim=1)
    return LowRankMatrix.from_factors(scale / 2 * torch.cat([products, directions], dim=1), right, span)


def expected_squared_error(
    size: int,
    *,
    squared_norm: float,
    trace: float,
    delta: float = 0.0,
    symmetrize: bool = True,
    num_directions: int = 1,
) -> float:
    """Return E‖D + delta I - H‖²_F exactly.

    One direction, unsymmetrised: E‖D‖² = n² E[uᵀH²u], so (n - 1) ‖H‖². Symmetrised: n²/2 [‖H‖²/n +
    (2 ‖H‖² + tr(H)²) / (n (n + 2))] - ‖H‖², from E[(uᵀHu)²]. Averaging m directions divides by m; the shift adds
    n delta², because the rest has mean zero.

    Args:
        size: n.
        squared_norm: ‖H‖²_F.
        trace: tr(H).
        delta: multiple of the identity that is added (δ).
        symmetrize: S, or else D.
        num_directions: m.
    """
    if symmetrize:
        fourth = (2 * squared_norm + trace**2) / (size * (size + 2))
        one = size**2 / 2 * (squared_norm / size + fourth) - squared_norm
    else:
        one = (size - 1) * squared_norm
    return one / num_directions + size * delta**2


def stated_squared_error(size: int, *, spectral_norm: float, delta: float = 0.0, num_directions: int = 1) -> float:
    """Return λ² n (n - 1) / m + n δ², what the Proposition of Semenov (2025) states for m = 1.

    It is printed as an equality; it is an upper bound, attained by multiples of the identity (unsymmetrised, by
    all H with H² = λ² I). λ must be the spectral norm: the largest eigenvalue of an indefinite H is too small.
    """
    return spectral_norm**2 * size * (size - 1) / num_directions + size * delta**2


def stated_sigma(size: int, *, spectral_norm: float, delta: float = 0.0, num_directions: int = 1) -> float:
    """Return the σ of the α_k rule, the root of `stated_squared_error`."""
    return math.sqrt(
        stated_squared_error(size, spectral_norm=spectral_norm, delta=delta, num_directions=num_directions)
    )
