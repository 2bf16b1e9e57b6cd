"""L-BFGS for many groups at once, on quadratics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.influence.responses import FullBatchLBFGS
from curvlab.training import TrainingDivergedError
from experiments.pbrf.tight_lbfgs import TightLBFGS

NORM = 1e-8


class Quadratic:
    """1/2 (x - minimum)ᵀ diag (x - minimum) for each of K rows."""

    depends_on: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, minimum: Tensor, diagonal: Tensor) -> None:
        self.minimum, self.diagonal = minimum, diagonal

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        gradient = self.diagonal * (displacement - self.minimum)
        return ((displacement - self.minimum) * gradient).sum(1) / 2, gradient


def test_many_small_components_are_one_large_norm() -> None:
    """At the start no component is above a tenth of the norm, and the norm is twice what is asked for."""
    objective = Quadratic(torch.full((20, 20), 0.99 * NORM / 10, dtype=torch.float64), torch.ones(20))
    start = torch.zeros(20, 20, dtype=torch.float64)
    assert float(objective(start, start)[1].norm()) > 1.9 * NORM
    with pytest.raises(TrainingDivergedError):
        FullBatchLBFGS(gradient_norm=NORM)(objective, start, 1)
    found = TightLBFGS(gradient_norm=NORM)(objective, start, 1)
    assert float(objective(found, start)[1].norm()) <= NORM


def test_the_minimum_is_that_of_each_row() -> None:
    minimum = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    objective = Quadratic(minimum, torch.logspace(-1, 1, 50, dtype=torch.float64))
    assert_close(TightLBFGS(gradient_norm=NORM)(objective, 0 * minimum, 1), minimum, rtol=0, atol=10 * NORM)
