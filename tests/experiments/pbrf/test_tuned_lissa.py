"""LiSSA with its scaling tuned, on least squares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import identity
from curvlab.solvers import Direct, DivergenceError
from experiments.pbrf.tuned_lissa import TunedLissa


def problem() -> tuple[object, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double().eval()
    operator = GaussNewtonOperator(model, nn.MSELoss(), (x, x[:, :1])) + 0.1 * identity
    return operator, torch.randn(4, 2, generator=generator, dtype=torch.float64)


def test_the_smallest_scale_that_converges_is_taken() -> None:
    operator, b = problem()  # λmax is about 8: 1/2 diverges, 1/30 does not
    settings = {"batch_size": 100, "num_steps": 400, "num_repeats": 3}
    found = TunedLissa(scales=(2, 30, 500), **settings).solve(
        operator, b, generator=torch.Generator().manual_seed(1)
    )
    alone = TunedLissa(scales=(30,), **settings).solve(operator, b, generator=torch.Generator().manual_seed(2))
    exact = Direct().solve(operator, b).x
    for solution in (found, alone):
        assert float((solution.x - exact).norm() / exact.norm()) < 0.1
        truth = ((b - operator @ solution.x).norm(dim=0) / b.norm(dim=0)).tolist()
        assert solution.residual.tolist() == pytest.approx(truth)
    assert found.num_matvecs == 3 * 400 * 2 + 2


def test_where_none_converges_it_says_so() -> None:
    operator, b = problem()
    with pytest.raises(DivergenceError, match="LiSSA diverges"):
        TunedLissa(scales=(1, 2), batch_size=100, num_steps=400).solve(operator, b)
    with pytest.raises(ValueError, match="scales is empty"):
        TunedLissa(scales=(), batch_size=100, num_steps=400).solve(operator, b)
