import pytest
import torch

from curvlab.optim import LowRankMatrix


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (6, 1), (6, 2), (6, 3), (4, 6), (50, 8)])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 30.0])
def test_shifted_solve_agrees_with_a_dense_one(size: int, rank: int, shift: float, generator) -> None:
    left, right = torch.randn(2, size, rank, dtype=torch.float64, generator=generator)
    b = torch.randn(size, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(left, right, torch.cat([left, right], 1))
    dense = left @ right.T
    torch.testing.assert_close(matrix.to_dense(), dense, rtol=1e-12, atol=1e-12)
    expected = torch.linalg.solve(dense + shift * torch.eye(size, dtype=torch.float64), b)
    assert float((matrix.solve_shifted(b, shift=shift) - expected).norm() / expected.norm()) < 1e-10


def test_dependent_columns_do_no_harm(generator) -> None:
    u = torch.randn(5, 1, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(u, u, torch.cat([u, 2 * u, 0 * u], 1))
    b = torch.randn(5, dtype=torch.float64, generator=generator)
    expected = torch.linalg.solve(u @ u.T + 0.1 * torch.eye(5, dtype=torch.float64), b)
    torch.testing.assert_close(matrix.solve_shifted(b, shift=0.1), expected, rtol=1e-10, atol=1e-12)


def test_a_tiny_shift_does_not_cancel() -> None:
    # 1/shift [I - A (shift I + BᵀA)⁻¹ Bᵀ] b would lose all digits here.
    one = torch.ones(1, 1, dtype=torch.float64)
    matrix = LowRankMatrix.from_factors(3 * one, one, one)
    assert float(matrix.solve_shifted(one[0], shift=1e-300)) == pytest.approx(1 / 3, rel=1e-14)


@pytest.mark.parametrize("size", [3, 6])
def test_smallest_eigenvalue_of_the_symmetric_part(size: int, generator) -> None:
    left, right = torch.randn(2, size, 2, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(left, right, torch.cat([left, right], 1))
    dense = left @ right.T
    expected = torch.linalg.eigvalsh((dense + dense.T) / 2)[0]
    assert matrix.smallest_eigenvalue() == pytest.approx(float(expected), rel=1e-10)


def test_zero_counts_as_an_eigenvalue_only_outside_the_span() -> None:
    u = torch.eye(3, 1, dtype=torch.float64)
    assert LowRankMatrix.from_factors(u, u, u).smallest_eigenvalue() == 0.0
    whole = torch.eye(2, dtype=torch.float64)
    assert LowRankMatrix.from_factors(5 * whole, whole, whole).smallest_eigenvalue() == pytest.approx(5.0)
