"""The solvers of influence: a saddle, LiSSA sampled, and functions of a matrix against recursions written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import Direct
from experiments.pbrf.solvers import BunchKaufman, RepeatedLissa, descent, matrix_functions, series


# ------------------------------------------------------------------ Bunch-Kaufman
def symmetric(generator: torch.Generator, eigenvalues: torch.Tensor) -> torch.Tensor:
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return basis @ torch.diag(eigenvalues) @ basis.T


def test_indefinite_is_solved_and_its_negative_eigenvalues_are_counted(generator) -> None:
    eigenvalues = torch.cat([torch.linspace(-3, -1e-6, 17), torch.linspace(1e-7, 50, 26)]).double()
    matrix = symmetric(generator, eigenvalues)
    b = torch.randn(43, 3, generator=generator, dtype=torch.float64)
    solution = BunchKaufman().solve(DenseOperator(matrix), b)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-5, atol=1e-5)
    assert solution.residual.max() < 1e-7  # condition number 5e8
    assert solution.converged
    assert solution.num_negative == 17
    assert solution.num_matvecs == 43  # the columns of the matrix
    assert BunchKaufman().solve(DenseOperator(matrix), b[:, 0]).x.shape == (43,)


def test_blocks_of_two_are_counted_once() -> None:
    matrix = torch.tensor([[0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    solution = BunchKaufman().solve(DenseOperator(matrix), torch.ones(3, dtype=torch.float64))
    assert solution.num_negative == 2  # eigenvalues -2, -1, 2
    torch.testing.assert_close(solution.x, torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64))


def test_singular_is_refused(generator) -> None:
    factor = torch.randn(10, 7, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    with pytest.raises(ValueError, match=r"DenseOperator is singular to rounding: a pivot of .*Add damping"):
        BunchKaufman().solve(operator, torch.ones(10, dtype=torch.float64))
    assert BunchKaufman().solve(operator + 0.1 * identity, torch.ones(10, dtype=torch.float64)).num_negative == 0


def test_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dense \(30, 30\) matrix, more than max_size = 20: use MinimumResidual"):
        BunchKaufman(max_size=20).solve(DenseOperator(torch.eye(30)), torch.ones(30))


# ------------------------------------------------------------------ LiSSA, sampled
def problem() -> tuple[LinearOperator, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double().eval()
    operator = GaussNewtonOperator(model, nn.MSELoss(), (x, x[:, :1])) + 0.1 * identity
    return operator, torch.randn(4, 2, generator=generator, dtype=torch.float64)


def test_the_smallest_scale_that_does_not_diverge_is_taken() -> None:
    operator, b = problem()  # λmax is about 8: 1/2 diverges, 1/30 does not
    solver = RepeatedLissa(batch_size=100, num_steps=250, num_repeats=2, scales=(2, 30, 500))
    found = solver.solve(operator, b, generator=torch.Generator().manual_seed(1))
    exact = Direct().solve(operator, b).x
    assert float((found.x - exact).norm() / exact.norm()) < 0.1
    truth = ((b - operator @ found.x).norm(dim=0) / b.norm(dim=0)).tolist()
    assert found.residual.tolist() == pytest.approx(truth)
    assert found.converged
    assert found.num_matvecs == 2 * 250 * 2 + 2


def test_where_all_scales_diverge_it_is_nan() -> None:
    operator, b = problem()
    found = RepeatedLissa(batch_size=100, num_steps=250, scales=(1, 2)).solve(operator, b)
    assert found.x.isnan().all()
    assert found.residual.shape == (2,)
    assert not found.converged
    with pytest.raises(ValueError, match="scales is empty"):
        RepeatedLissa(batch_size=100, num_steps=250, scales=()).solve(operator, b)


# ------------------------------------------------------------------ functions of a matrix
def recursion(matrix: Tensor, b: Tensor, scale: float, num_steps: int) -> Tensor:
    """Eq. 48 from t = 0, term by term: u <- v/σ + (I - A/σ) u."""
    u = torch.zeros_like(b)
    for _ in range(num_steps):
        u = b / scale + u - matrix @ u / scale
    return u


def test_the_series_is_the_recursion_and_the_descent_its_limit(generator) -> None:
    eigenvalues = torch.cat([torch.linspace(-0.004, -0.001, 5), torch.linspace(0.001, 18, 30)]).double()
    matrix = symmetric(generator, eigenvalues)
    b = torch.randn(35, 3, generator=generator, dtype=torch.float64)
    functions = {f"{scale}": series(scale, 500) for scale in (5, 10, 50)} | {"flow": descent(10.0)}
    found = matrix_functions(DenseOperator(matrix), b, functions, rtol=1e-8, max_steps=100)
    for scale in (10, 50):
        expected = recursion(matrix, b, scale, 500)
        torch.testing.assert_close(found.values[f"{scale}"], expected, rtol=1e-7, atol=1e-7)
    # Gradient descent in tiny steps, of the same length.
    torch.testing.assert_close(found.values["flow"], recursion(matrix, b, 2e3, 20_000), rtol=2e-2, atol=1e-3)
    assert not torch.isfinite(found.values["5"]).all() or found.values["5"].norm() > 1e100  # 18 > 2 · 5
    assert found.num_matvecs <= 35 + 3
    singular = torch.zeros(2, dtype=torch.float64)
    assert series(10, 500)(singular).tolist() == [50.0, 50.0]
    assert descent(7.0)(singular).tolist() == [7.0, 7.0]


def test_the_space_grows_until_nothing_changes(generator) -> None:
    matrix = symmetric(generator, torch.logspace(-3, 1, 200).double())
    b = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    found = matrix_functions(DenseOperator(matrix), b, {"flow": descent(3.0)}, rtol=1e-6, max_steps=100)
    values, vectors = torch.linalg.eigh(matrix)
    exact = vectors @ (descent(3.0)(values)[:, None] * (vectors.T @ b))
    assert float((found.values["flow"] - exact).norm() / exact.norm()) < 1e-6
    assert found.change["flow"] <= 1e-6
    assert found.num_matvecs < 100
    few = matrix_functions(DenseOperator(matrix), b, {"flow": descent(3.0)}, rtol=1e-6, max_steps=2)
    assert 1e-6 < few.change["flow"] < math.inf
