import pytest
import torch

from curvlab.linalg import DenseOperator, identity
from experiments.pbrf.bunch_kaufman import BunchKaufman


def symmetric(generator: torch.Generator, eigenvalues: torch.Tensor) -> torch.Tensor:
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return basis @ torch.diag(eigenvalues) @ basis.T


def test_indefinite_is_solved_and_its_negative_eigenvalues_are_counted(generator) -> None:
    eigenvalues = torch.cat([torch.linspace(-3, -1e-6, 17), torch.linspace(1e-7, 50, 26)]).double()
    matrix = symmetric(generator, eigenvalues)
    b = torch.randn(43, 3, generator=generator, dtype=torch.float64)
    solution = BunchKaufman().solve(DenseOperator(matrix), b)
    # Condition number 5e8: either solver may be off by 1e-7 of its length, by how much depends on the processor.
    expected = torch.linalg.solve(matrix, b)
    assert (solution.x - expected).norm() < 1e-5 * expected.norm()
    assert solution.residual.max() < 1e-7
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
