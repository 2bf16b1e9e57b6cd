import pytest
import torch

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, Nystrom, default_solver


def test_nystrom_for_several_right_hand_sides_of_a_large_matrix() -> None:
    assert default_solver(100_000, 25).preconditioner == Nystrom(100)
    assert default_solver(100_000, 1).preconditioner is None
    assert default_solver(60, 2).preconditioner is None  # a rank of 8 of 60
    assert default_solver(100_000, 25, rtol=1e-4).rtol == 1e-4
    with pytest.raises(ValueError, match="at least 1, got 10 and 0"):
        default_solver(10, 0)


def test_fewer_products_than_block_cg_alone(generator: torch.Generator) -> None:
    # Some large eigenvalues and a tail down to the damping, as in trained networks.
    eigenvalues = torch.cat([torch.logspace(0, -2, 50), torch.logspace(-2, -4, 1450)]).double()
    basis, _ = torch.linalg.qr(torch.randn(1500, 1500, generator=generator, dtype=torch.float64))
    matrix = (basis * eigenvalues) @ basis.T
    damped = DenseOperator(matrix) + 1e-4 * identity
    b = torch.randn(1500, 10, generator=generator, dtype=torch.float64)
    alone = BlockConjugateGradient().solve(damped, b)
    solution = default_solver(1500, 10).solve(damped, b, generator=generator)
    assert solution.converged
    assert solution.num_matvecs < 0.9 * alone.num_matvecs
    exact = torch.linalg.solve(matrix + 1e-4 * torch.eye(1500, dtype=torch.float64), b)
    assert float((damped @ (solution.x - exact)).norm()) <= 1e-2 * float(b.norm())


def test_small_matrices_with_more_right_hand_sides_than_rows(generator: torch.Generator) -> None:
    matrix = torch.randn(14, 14, generator=generator)
    damped = DenseOperator(matrix @ matrix.T) + 1e-3 * identity
    b = torch.randn(14, 20, generator=generator)
    for solver in (default_solver(14, 20), BlockConjugateGradient(preconditioner=Nystrom(14))):
        assert solver.solve(damped, b, generator=generator).converged
