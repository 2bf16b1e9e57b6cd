"""What every solver returns, and the residual that it must state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator


@dataclass(frozen=True)
class Solution:
    """An approximate solution of A x = b.

    Attributes:
        x: (P,) or (P, K), as b was.
        residual: () or (K,), ‖b - A x‖ / ‖b‖, recomputed from x at the end; 0 where b is 0.
        converged: whether every column met the solver's tolerance. False is an answer that must be handled.
        num_matvecs: products paid for, counted per vector, set-up and the final residual included.
        error: () or (K,), an estimate of ‖x - A⁻¹b‖ / ‖x‖ from solvers that have one (averaging Lissa); else None.
    """

    x: Tensor
    residual: Tensor
    converged: bool
    num_matvecs: int
    error: Tensor | None = None


def relative_norm(operator: LinearOperator, residuals: Tensor, right_hand_sides: Tensor) -> Tensor:
    """Return ‖r‖ / ‖b‖ of each column of two (P, K); 0 where b is 0."""
    scale = operator.norm(right_hand_sides)
    return torch.where(scale > 0, operator.norm(residuals) / scale, torch.zeros_like(scale))
