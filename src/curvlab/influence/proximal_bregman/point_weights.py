"""ε of the proximal Bregman objective, point by point."""

from __future__ import annotations

import torch
from torch import Tensor


def per_point(epsilon: float | Tensor, num_points: int) -> Tensor:
    """Return epsilon as (K,), checked: one value for all points, or one each; none of them zero."""
    values = torch.as_tensor(epsilon, dtype=torch.float64)
    if values.ndim and values.shape != (num_points,):
        raise ValueError(
            f"epsilon has shape {tuple(values.shape)} for {num_points} points: give one number, or one for each "
            "point"
        )
    if not ((values != 0) & values.isfinite()).all():
        raise ValueError(
            "epsilon must not be zero, and finite: it is the weight of the point's loss; the paper has 1e-8"
        )
    return values.expand(num_points)
