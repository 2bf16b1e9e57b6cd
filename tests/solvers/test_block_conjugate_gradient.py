import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, IndefiniteOperatorError, Nystrom


def outliers(size: int = 200, count: int = 40, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Eigenvalues 1, ..., 1e-2 (count of them), the others 0: a trained network's shape."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = basis[:, :count] * torch.logspace(0, -2, count).double() @ basis[:, :count].T
    return ((matrix + matrix.T) / 2).to(dtype)


def block(size: int, width: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_columns_share_what_they_find(counting_operator) -> None:
    """In exact arithmetic 40 outliers and one cluster take (40 + 1) / 10 steps of a block of 10, rounded up."""
    op = counting_operator(outliers())
    steps: list[int] = []
    solver = BlockConjugateGradient(rtol=1e-8, callback=lambda state: steps.append(state.num_steps))
    solution = solver.solve(op + 1e-3 * identity, block(200, 10))
    assert solution.converged
    assert len(steps) <= 7
    assert solution.num_matvecs == op.columns == 10 * len(steps) + 10
    separate = ConjugateGradient(rtol=1e-8).solve(op + 1e-3 * identity, block(200, 10))
    assert solution.num_matvecs < separate.num_matvecs / 4


def test_one_column_is_conjugate_gradients(counting_operator) -> None:
    op = counting_operator(outliers()) + 1e-2 * identity
    b = block(200, 1)[:, 0]
    histories: list[list[float]] = [[], []]
    for solver, history in zip((BlockConjugateGradient, ConjugateGradient), histories, strict=True):
        solver(rtol=1e-6, callback=lambda s, h=history: h.append(float(s.relative_residuals[0]))).solve(op, b)
    assert abs(len(histories[0]) - len(histories[1])) <= 1
    torch.testing.assert_close(torch.tensor(histories[0][:20]), torch.tensor(histories[1][:20]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("preconditioner", [None, Nystrom(20)])
def test_dependent_and_zero_columns(preconditioner, generator) -> None:
    matrix = outliers(50, 10)
    b = block(50, 6)
    b[:, 2], b[:, 4], b[:, 5] = b[:, 0], 0, b[:, 0] - 1e-7 * b[:, 1]
    solver = BlockConjugateGradient(rtol=1e-9, preconditioner=preconditioner)
    solution = solver.solve(DenseOperator(matrix) + 0.01 * identity, b, generator=generator)
    truth = torch.linalg.solve(matrix + 0.01 * torch.eye(50, dtype=torch.float64), b)
    torch.testing.assert_close(solution.x, truth, rtol=1e-6, atol=1e-7)
    assert solution.converged


def test_more_columns_than_rows_and_columns_of_all_sizes() -> None:
    matrix = outliers(12, 5)
    b = block(12, 30) * torch.logspace(-12, 6, 30, dtype=torch.float64)
    solution = BlockConjugateGradient(rtol=1e-10).solve(DenseOperator(matrix) + 0.1 * identity, b)
    assert solution.converged
    assert solution.num_matvecs <= 3 * 12 + 2 * 30
    truth = torch.linalg.solve(matrix + 0.1 * torch.eye(12, dtype=torch.float64), b)
    assert float(((solution.x - truth).norm(dim=0) / truth.norm(dim=0)).max()) < 1e-9


@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_single_precision_reaches_what_conjugate_gradients_reach(damping: float) -> None:
    op = DenseOperator(outliers(300, 120, dtype=torch.float32), is_psd=True) + damping * identity
    b = block(300, 20, dtype=torch.float32)
    solution = BlockConjugateGradient(rtol=1e-3).solve(op, b)
    separate = ConjugateGradient(rtol=1e-3).solve(op, b)
    assert solution.converged
    assert separate.converged
    assert solution.num_matvecs < 0.7 * separate.num_matvecs


def test_states_the_residual_that_it_reached() -> None:
    op = DenseOperator(outliers()) + 1e-4 * identity
    b = block(200, 3)
    solution = BlockConjugateGradient(rtol=1e-6, max_steps=4).solve(op, b)
    truth = (b - op @ solution.x).norm(dim=0) / b.norm(dim=0)
    torch.testing.assert_close(solution.residual, truth)
    assert not solution.converged
    assert solution.num_matvecs == 4 * 3 + 3


def test_indefinite_operators_and_preconditioners_are_refused(generator) -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=torch.float64))
    with pytest.raises(IndefiniteOperatorError, match="is not positive definite: pᵀAp"):
        BlockConjugateGradient().solve(DenseOperator(matrix) + 0.1 * identity, block(4, 2))
    wrong = DenseOperator(-torch.eye(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="the preconditioner DenseOperator is not positive definite"):
        BlockConjugateGradient(preconditioner=wrong).solve(DenseOperator(torch.eye(4).double()), block(4, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rtol": 0.0}, "rtol must be between 0 and 1"), ({"max_steps": 0}, "max_steps must be at least 1")],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockConjugateGradient(**settings)
