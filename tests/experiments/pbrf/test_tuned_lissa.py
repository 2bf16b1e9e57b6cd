"""LiSSA with its scaling tuned, on least squares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import identity
from curvlab.solvers import Direct
from experiments.pbrf.tuned_lissa import TunedLissa

REPEATS = 2


def problem() -> tuple[object, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double().eval()
    operator = GaussNewtonOperator(model, nn.MSELoss(), (x, x[:, :1])) + 0.1 * identity
    return operator, torch.randn(4, 2, generator=generator, dtype=torch.float64)


def solve(*scales: float, num_steps: int = 250, rtol: float | None = None):
    operator, b = problem()
    solver = TunedLissa(batch_size=100, num_steps=num_steps, num_repeats=REPEATS, scales=scales, rtol=rtol)
    return solver.solve(operator, b, generator=torch.Generator().manual_seed(1))


def test_the_smallest_scale_that_converges_is_taken() -> None:
    operator, b = problem()  # λmax is about 8: 1/2 diverges, 1/30 does not
    found = solve(2, 30, 500)
    exact = Direct().solve(operator, b).x
    assert float((found.x - exact).norm() / exact.norm()) < 0.1
    truth = ((b - operator @ found.x).norm(dim=0) / b.norm(dim=0)).tolist()
    assert found.residual.tolist() == pytest.approx(truth)
    assert found.converged
    assert found.num_matvecs == REPEATS * 250 * 2 + 2


def test_a_scale_that_merely_does_not_blow_up_is_passed_over() -> None:
    slow, quick = solve(5000, num_steps=100), solve(30, num_steps=100)
    assert not slow.converged
    assert float(slow.residual.max()) > 0.5
    found = solve(5000, 30, num_steps=100)
    assert found.converged
    assert float(found.residual.max()) == pytest.approx(float(quick.residual.max()), abs=0.05)
    assert found.num_matvecs == 2 * (REPEATS * 100 * 2 + 2)  # what was tried in vain is paid for as well


def test_where_none_converges_the_best_is_returned() -> None:
    found, best = (solve(*scales, num_steps=100, rtol=1e-6) for scales in ((30, 5000), (30,)))
    assert not found.converged
    assert found.residual.tolist() == best.residual.tolist()  # the first to draw from the generator
    assert found.num_matvecs == 2 * best.num_matvecs


def test_where_all_diverge_it_is_nan() -> None:
    found = solve(1, 2)
    assert found.x.isnan().all()
    assert found.residual.isnan().all()
    assert found.residual.shape == (2,)
    assert not found.converged
    with pytest.raises(ValueError, match="scales is empty"):
        solve()
