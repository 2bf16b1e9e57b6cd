import pytest
import torch

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import IndefiniteOperatorError
from experiments.benchmarks.solvers.chebyshev import Chebyshev


class CountingOperator(DenseOperator):
    """Counts the columns of its products."""

    columns = 0

    def matmat(self, vectors: torch.Tensor) -> torch.Tensor:
        self.columns += vectors.shape[1]
        return super().matmat(vectors)


def spread(size: int = 60) -> torch.Tensor:
    return torch.diag(torch.linspace(0, 1, size, dtype=torch.float64))


def test_residuals_are_chebyshev_polynomials() -> None:
    """On a diagonal matrix the residual's entries are T_t(z) / T_t(z_0), evaluated here by cosines."""
    damping, largest = 0.01, 1.01
    b = torch.ones(60, dtype=torch.float64)
    op = DenseOperator(spread()) + damping * identity
    solver = Chebyshev(rtol=1e-12, max_steps=9, largest_eigenvalue=largest)
    solution = solver.solve(op, b)
    eigenvalues = torch.linspace(0, 1, 60, dtype=torch.float64) + damping
    center, radius = (largest + damping) / 2, (largest - damping) / 2
    inside = torch.cos(9 * torch.acos(((center - eigenvalues) / radius).clamp(-1, 1)))
    outside = torch.cosh(9 * torch.acosh(torch.tensor(center / radius, dtype=torch.float64)))
    torch.testing.assert_close(b - op @ solution.x, inside / outside, rtol=1e-8, atol=1e-10)
    assert not solution.converged
    assert solution.num_matvecs == 9


def test_measures_the_largest_eigenvalue_and_counts_it(generator) -> None:
    op = CountingOperator(spread())
    b = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    solution = Chebyshev(rtol=1e-3).solve(op + 0.01 * identity, b, generator=generator)
    assert solution.converged
    assert solution.num_matvecs == op.columns
    # 2 q^t with q = (sqrt(kappa) - 1) / (sqrt(kappa) + 1), kappa about 101: 40 steps a column.
    assert op.columns <= 60 + 3 * 42
    damped = spread() + 0.01 * torch.eye(60, dtype=torch.float64)
    assert float((b - damped @ solution.x).norm(dim=0).max()) <= 1e-3 * float(b.norm(dim=0).max())


def test_too_small_a_bound_is_noticed() -> None:
    op = DenseOperator(spread()) + 0.01 * identity
    with pytest.raises(ValueError, match=r"lies above largest_eigenvalue = 0.5\. Pass a larger bound"):
        Chebyshev(largest_eigenvalue=0.5).solve(op, torch.ones(60, dtype=torch.float64))


def test_needs_damping() -> None:
    with pytest.raises(IndefiniteOperatorError, match="above its damping 0 > 0"):
        Chebyshev().solve(DenseOperator(spread()), torch.ones(60, dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rtol": 2.0}, "rtol must be between 0 and 1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"largest_eigenvalue": 0.0}, "largest_eigenvalue must be positive"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chebyshev(**settings)
