"""Conjugate gradients, of one and of many right-hand sides, the minimum residual, the direct solve."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    Direct,
    IndefiniteOperatorError,
    MinimumResidual,
    Nystrom,
)
from tests.matrices import CountingOperator, with_spectrum
from tests.refusals import refuses


def spd(size: int, condition: float, *, seed: int = 0) -> Tensor:
    return with_spectrum(torch.logspace(0, -torch.tensor(condition).log10().item(), size), seed)


@pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-9])
def test_reaches_rtol_and_counts_every_product(generator, rtol: float) -> None:
    matrix = spd(80, 1e3)
    operator = CountingOperator(matrix)
    b = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    b[:, 3] = 0
    b[:, 4] = torch.linalg.eigh(matrix).eigenvectors[:, 0]  # done after one step: must not be multiplied on
    solution = ConjugateGradient(rtol=rtol).solve(operator, b)
    assert solution.converged
    assert bool((solution.residual <= rtol).all())
    assert solution.num_matvecs == operator.columns
    single = sum(ConjugateGradient(rtol=rtol).solve(operator, b[:, k]).num_matvecs for k in range(5))
    # Together they are rounded otherwise, which may cost or save a step.
    assert solution.num_matvecs == pytest.approx(single, rel=0.02)


def test_finishes_in_as_many_steps_as_distinct_eigenvalues(generator) -> None:
    values = torch.cat([torch.full((20,), v) for v in (1.0, 4.0, 9.0)]).double()
    matrix, steps = with_spectrum(values, generator), []
    solver = ConjugateGradient(rtol=1e-10, callback=lambda state: steps.append(state.relative_residuals))
    b = torch.randn(60, generator=generator, dtype=torch.float64)
    assert solver.solve(DenseOperator(matrix), b).converged
    assert len(steps) == 3
    assert steps[0].shape == (1,)
    assert float(steps[-1]) <= 1e-10 < float(steps[-2])


def test_exact_preconditioner_needs_one_step(generator) -> None:
    matrix = spd(40, 1e4)
    b = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    solver = ConjugateGradient(rtol=1e-8, preconditioner=DenseOperator((inverse + inverse.T) / 2))
    solution = solver.solve(DenseOperator(matrix), b)
    assert solution.num_matvecs == 3 + 3
    assert solution.converged


def test_warm_start(generator) -> None:
    matrix = spd(60, 1e3)
    operator = CountingOperator(matrix)
    b = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    truth = torch.linalg.solve(matrix, b)
    solution = ConjugateGradient(rtol=1e-6).solve(operator, b, x0=truth)
    assert solution.num_matvecs == operator.columns == 2
    torch.testing.assert_close(solution.x, truth)
    refuses("x0 has shape", ConjugateGradient().solve, operator, b, x0=truth[:, 0])


def test_step_limit_is_kept_and_told() -> None:
    operator = CountingOperator(spd(80, 1e4))
    solution = ConjugateGradient(rtol=1e-8, max_steps=5).solve(operator, torch.ones(80, dtype=torch.float64))
    assert not solution.converged
    assert solution.num_matvecs == operator.columns == 5 + 1
    assert float(solution.residual) > 1e-8


class Glitching(DenseOperator):
    """Its fifth product is wrong, so that the recurrence no longer knows the residual."""

    calls = 0

    def matmat(self, vectors: Tensor) -> Tensor:
        self.calls += 1
        return super().matmat(vectors) * (1.01 if self.calls == 5 else 1.0)


def test_restarts_when_the_recurrence_has_drifted(generator) -> None:
    matrix = spd(60, 100.0)
    operator = Glitching(matrix)
    b = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    solution = ConjugateGradient(rtol=1e-8).solve(operator, b)
    assert solution.converged
    assert float(((b - matrix @ solution.x).norm(dim=0) / b.norm(dim=0)).max()) <= 1.01e-8


@pytest.mark.parametrize(("condition", "reachable"), [(10.0, True), (1e3, False), (1e5, False)])
def test_single_precision_says_what_it_reached(generator, condition: float, reachable: bool) -> None:
    b = torch.randn(200, 3, generator=generator, dtype=torch.float64).float()
    operator = DenseOperator(spd(200, condition).float())
    solution = ConjugateGradient(rtol=1e-6, max_steps=2000).solve(operator, b)
    truth = (b.double() - operator.matrix.double() @ solution.x.double()).norm(dim=0) / b.double().norm(dim=0)
    torch.testing.assert_close(solution.residual.double(), truth, rtol=0.4, atol=1e-7)
    assert solution.converged == reachable
    assert float(truth.max()) <= (1e-6 if reachable else 1e-7 * condition)


def test_singular_but_consistent_is_solved_and_inconsistent_is_told(generator) -> None:
    factor = torch.randn(30, 10, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    inside = factor @ torch.ones(10, dtype=torch.float64)
    assert ConjugateGradient(rtol=1e-8).solve(operator, inside).converged
    outside = torch.ones(30, dtype=torch.float64)
    assert not ConjugateGradient(rtol=1e-8, max_steps=200).solve(operator, outside).converged


@pytest.mark.parametrize("solver", [ConjugateGradient, BlockConjugateGradient])
def test_indefinite_matrices_and_preconditioners_are_refused(solver: type[ConjugateGradient]) -> None:
    """Where the damping does not suffice, where definiteness is claimed, and M instead of A."""
    b, claimed = block(4, 2), DenseOperator(torch.diag(torch.tensor([1.0, 2, -1, 3])).double(), is_psd=True)
    honest = DenseOperator(claimed.matrix) + 0.1 * identity
    for operator in (honest, claimed):
        refuses(
            "is not positive definite.*damping",
            solver(rtol=1e-10).solve,
            operator,
            b,
            error=IndefiniteOperatorError,
        )
    negative = DenseOperator(-torch.eye(4).double())
    text = "preconditioner DenseOperator is not positive definite"
    refuses(text, solver(preconditioner=negative).solve, DenseOperator(torch.eye(4).double()), b)


# ----------------------------------------------------------------------------------------
def outliers(size: int = 200, count: int = 40, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Eigenvalues 1, ..., 1e-2 (count of them), the others 0: a trained network's shape."""
    return with_spectrum(torch.cat([torch.logspace(0, -2, count), torch.zeros(size - count)])).to(dtype)


def block(size: int, width: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_columns_share_what_they_find() -> None:
    """In exact arithmetic 40 outliers and one cluster take (40 + 1) / 10 steps of a block of 10, rounded up."""
    op = CountingOperator(outliers())
    steps: list[int] = []
    solver = BlockConjugateGradient(rtol=1e-8, callback=lambda state: steps.append(state.num_steps))
    solution = solver.solve(op + 1e-3 * identity, block(200, 10))
    assert solution.converged
    assert len(steps) <= 7
    assert solution.num_matvecs == op.columns == 10 * len(steps) + 10
    separate = ConjugateGradient(rtol=1e-8).solve(op + 1e-3 * identity, block(200, 10))
    assert solution.num_matvecs < separate.num_matvecs / 4


def test_one_column_is_conjugate_gradients() -> None:
    op = CountingOperator(outliers()) + 1e-2 * identity
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


# --- MINRES where conjugate gradients refuse: against the dense solution and SciPy's iterates
def indefinite(size: int, generator: torch.Generator) -> torch.Tensor:
    eigenvalues = torch.linspace(0.5, 3.0, size, dtype=torch.float64)
    eigenvalues[::3] *= -1
    return with_spectrum(eigenvalues, generator)


def test_solves_indefinite_systems_and_states_the_residual(generator: torch.Generator) -> None:
    matrix = indefinite(30, generator)
    b = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    solver = MinimumResidual(rtol=1e-9, callback=lambda state: seen.append(state.relative_residuals))
    solution = solver.solve(DenseOperator(matrix), b)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-8)
    assert solution.converged
    assert solution.num_matvecs == 4 * (len(seen) + 1)
    history = torch.stack(seen)
    assert solution.history is not None
    assert torch.equal(solution.history, history)
    assert bool((history[1:] <= history[:-1] + 1e-14).all())  # it never grows


def test_iterates_are_scipys(generator: torch.Generator) -> None:
    matrix = indefinite(25, generator)
    b = torch.randn(25, 1, generator=generator, dtype=torch.float64)
    found = MinimumResidual(rtol=1e-12, max_steps=7).solve(DenseOperator(matrix), b)
    expected, _ = scipy.sparse.linalg.minres(matrix.numpy(), b.numpy()[:, 0], rtol=1e-14, maxiter=7)
    np.testing.assert_allclose(found.x[:, 0].numpy(), expected, rtol=1e-8, atol=1e-10)
    assert not found.converged


# ----------------------------------------------------------------------------------------
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
