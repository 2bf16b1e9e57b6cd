"""How well two sets of influence scores agree, and which of the paper's three cases that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    columns = torch.cat([matrix.double().square().mean(0).sqrt() for matrix in scores])
    return float(columns[columns.isfinite()].median())
