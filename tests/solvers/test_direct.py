import pytest
import torch

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import Direct


def test_indefinite_is_solved(generator) -> None:
    matrix = torch.randn(15, 15, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    b = torch.randn(15, 2, generator=generator, dtype=torch.float64)
    solution = Direct().solve(DenseOperator(matrix), b)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-9, atol=1e-10)
    assert solution.converged
    assert solution.num_matvecs == 15  # the columns of the matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_is_refused(generator, dtype: torch.dtype) -> None:
    factor = torch.randn(10, 7, generator=generator, dtype=dtype)
    operator = DenseOperator(factor @ factor.T)
    with pytest.raises(ValueError, match=r"DenseOperator is singular: 3 of 10 eigenvalues are zero.*Add damping"):
        Direct().solve(operator, torch.ones(10, dtype=dtype))
    assert Direct().solve(operator + 0.1 * identity, torch.ones(10, dtype=dtype)).converged


def test_too_large_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"dense \(30, 30\) matrix, more than max_size = 20: use ConjugateGradient"
    ):
        Direct(max_size=20).solve(DenseOperator(torch.eye(30)), torch.ones(30))
