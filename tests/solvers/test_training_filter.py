"""The filter against the dense eigendecomposition, and its two limits."""

import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import ConjugateGradient, IndefiniteOperatorError, TrainingFilter
from curvlab.solvers.gradient_flow import KrylovSpace

FP64 = torch.float64


def dense_filter(matrix: Tensor, time: float, b: Tensor) -> Tensor:
    """The geometric sum of many small steps would give the same; here by eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    flat = values.abs() * time < 1e-10
    gains = torch.where(flat, time, -torch.expm1(-time * values) / torch.where(flat, 1.0, values))
    return vectors @ (gains[:, None] * (vectors.T @ b))


@pytest.mark.parametrize("rtol", [1e-2, 1e-9])
@pytest.mark.parametrize("time", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("num_columns", [1, 5])
def test_equals_the_dense_filter(build_examples, generator, num_columns: int, time: float, rtol: float) -> None:
    for kind in ("decaying", "heavy_tailed", "rank_deficient"):
        matrix = build_examples(kind, num_examples=200, size=80).mean(0)
        b = torch.randn(80, num_columns, generator=generator, dtype=FP64)
        solution = TrainingFilter(time, rtol=rtol).solve(DenseOperator(matrix, is_psd=True), b)
        expected = dense_filter(matrix, time, b)
        error = (solution.x - expected).norm(dim=0) / (time * b.norm(dim=0))
        assert float(error.max()) <= rtol
        assert float(((solution.x - expected).norm(dim=0) / expected.norm(dim=0)).max()) <= 3 * rtol
        assert solution.converged
        assert float(solution.residual.max()) <= rtol


def test_is_where_many_small_steps_end(build_examples, generator) -> None:
    matrix = build_examples("decaying", num_examples=50, size=12).mean(0)
    b = torch.randn(12, generator=generator, dtype=FP64)
    x, rate, num_steps = torch.zeros(12, dtype=FP64), 1e-4, 20_000
    for _ in range(num_steps):
        x = x - rate * (matrix @ x - b)
    found = TrainingFilter(rate * num_steps, rtol=1e-8).solve(DenseOperator(matrix, is_psd=True), b).x
    torch.testing.assert_close(found, x, rtol=2e-4, atol=2e-4 * float(x.norm()))


def test_limits_are_the_inverse_and_a_multiple_of_the_identity(examples: Tensor, generator) -> None:
    matrix = examples.mean(0)
    operator = DenseOperator(matrix) + 0.1 * identity
    b = torch.randn(20, 3, generator=generator, dtype=FP64)
    long = TrainingFilter(1e4, rtol=1e-11).solve(operator, b)
    inverse = torch.linalg.solve(matrix + 0.1 * torch.eye(20, dtype=FP64), b)
    torch.testing.assert_close(long.x, inverse, rtol=1e-9, atol=1e-10)
    short = TrainingFilter(1e-8, rtol=1e-6).solve(operator, b)
    torch.testing.assert_close(short.x, 1e-8 * b, rtol=1e-5, atol=0)


def test_columns_share_their_products(counting_operator, build_examples, generator) -> None:
    operator = counting_operator(build_examples("decaying", num_examples=300, size=120).mean(0))
    operator_is_psd = DenseOperator(operator.matrix, is_psd=True)
    b = torch.randn(120, 8, generator=generator, dtype=FP64)
    together = TrainingFilter(1000.0).solve(operator + 1e-9 * identity, b)
    assert together.num_matvecs == operator.columns
    alone = [TrainingFilter(1000.0).solve(operator_is_psd, column).num_matvecs for column in b.T]
    assert together.num_matvecs < 0.8 * sum(alone)


def test_too_few_steps_are_told(build_examples, generator) -> None:
    matrix = build_examples("decaying", num_examples=300, size=120).mean(0)
    b = torch.randn(120, 2, generator=generator, dtype=FP64)
    solution = TrainingFilter(1e4, max_steps=2).solve(DenseOperator(matrix, is_psd=True), b)
    assert not solution.converged
    assert solution.num_matvecs == 3 * 2
    exponential = torch.linalg.matrix_exp(-1e4 * matrix) @ b
    # What is left of the flow, by the dense matrix; the speed x' belongs to the approximate flow.
    left = (b - matrix @ solution.x - exponential).norm(dim=0) / b.norm(dim=0)
    assert bool((left > 0.01).all())
    assert bool((solution.residual > 0.01).all())


def test_single_precision_reaches_its_tolerance(build_examples, generator) -> None:
    matrix = build_examples("heavy_tailed", num_examples=200, size=80).mean(0)
    b = torch.randn(80, 4, generator=generator, dtype=FP64)
    solution = TrainingFilter(50.0, rtol=1e-3).solve(DenseOperator(matrix.float(), is_psd=True), b.float())
    assert solution.converged
    expected = dense_filter(matrix, 50.0, b)
    assert float((solution.x.double() - expected).norm() / expected.norm()) < 3e-3


def test_krylov_space_is_orthonormal_and_closes(build_examples, generator) -> None:
    matrix = build_examples("rank_deficient", num_examples=60, size=20).mean(0)  # rank 10
    b = torch.randn(20, 3, generator=generator, dtype=FP64)
    space = KrylovSpace(DenseOperator(matrix), torch.cat([b, b[:, :1]], dim=1))
    assert space.factor.shape == (3, 4)
    while not space.complete:
        space.step()
    assert space.basis.shape[1] == 13
    eye = torch.eye(13, dtype=FP64)
    torch.testing.assert_close(space.basis.T @ space.basis, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(space.basis.T @ matrix @ space.basis, space.projected, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix @ space.basis, space.basis @ space.projected, rtol=0, atol=1e-11)


def test_indefinite_matrices_are_refused() -> None:
    operator = DenseOperator(torch.diag(torch.tensor([1.0, -1.0], dtype=FP64)))
    with pytest.raises(IndefiniteOperatorError, match="add damping larger"):
        TrainingFilter(1.0).solve(operator, torch.ones(2, dtype=FP64))


def test_damping_imitates_the_filter_within_a_third(build_examples, generator) -> None:
    """(1 - e^{-x}) / x lies between 1 / (1 + x) and 1.3 / (1 + x) for all x = time μ."""
    x = torch.logspace(-4, 4, 2000, dtype=FP64)
    ratio = -torch.expm1(-x) / x * (1 + x)
    assert float(ratio.min()) >= 1.0
    assert float(ratio.max()) < 1.3
    matrix = build_examples("decaying", num_examples=200, size=40).mean(0)
    b = torch.randn(40, generator=generator, dtype=FP64)
    operator = DenseOperator(matrix, is_psd=True)
    filtered = TrainingFilter(20.0, rtol=1e-8).solve(operator, b).x
    damped = ConjugateGradient(rtol=1e-10).solve(operator + 1 / 20.0 * identity, b).x
    assert float((filtered - damped).norm() / damped.norm()) < 0.3
