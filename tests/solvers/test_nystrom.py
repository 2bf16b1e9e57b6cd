import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import ConjugateGradient, IndefiniteOperatorError, Nystrom

DAMPING = 1e-4


def decaying(size: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = basis * torch.arange(1, size + 1).double() ** -2 @ basis.T
    return (matrix + matrix.T) / 2


def test_full_rank_is_the_inverse(generator) -> None:
    matrix = decaying(30)
    inverse, num_matvecs = Nystrom(100).build(DenseOperator(matrix) + DAMPING * identity, generator=generator)
    assert num_matvecs == 30
    damped = matrix + DAMPING * torch.eye(30, dtype=torch.float64)
    torch.testing.assert_close(inverse.to_dense(), torch.linalg.inv(damped), rtol=1e-6, atol=1e-6)


def test_matches_the_dense_formula(generator) -> None:
    matrix = decaying(60)
    operator = DenseOperator(matrix) + DAMPING * identity
    inverse, _ = Nystrom(12).build(operator, generator=torch.Generator().manual_seed(3))
    tests = operator.randn(12, torch.Generator().manual_seed(3))
    images = matrix @ tests
    approximation = images @ torch.linalg.solve(tests.T @ images, images.T)  # any basis of the same tests
    values, vectors = torch.linalg.eigh(approximation)
    values, vectors = values.flip(0)[:12], vectors.flip(1)[:, :12]
    tail = 1 / (values[-1] + DAMPING)
    expected = tail * torch.eye(60, dtype=torch.float64) + vectors * (1 / (values + DAMPING) - tail) @ vectors.T
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=1e-6, atol=1e-6 * float(tail))
    assert bool((inverse.eigenvalues <= torch.linalg.eigvalsh(matrix).flip(0)[:12] + 1e-12).all())
    assert inverse.is_psd


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saves_steps_and_counts_its_set_up(generator, dtype: torch.dtype) -> None:
    matrix = decaying(400).to(dtype)
    operator = DenseOperator(matrix) + DAMPING * identity
    b = torch.randn(400, 20, generator=generator, dtype=dtype)
    plain = ConjugateGradient(rtol=1e-3).solve(operator, b)
    solver = ConjugateGradient(rtol=1e-3, preconditioner=Nystrom(60))
    preconditioned = solver.solve(operator, b, generator=generator)
    assert plain.converged
    assert preconditioned.converged
    assert preconditioned.num_matvecs < plain.num_matvecs / 3
    inverse, set_up = Nystrom(60).build(operator, generator=generator)
    reused = ConjugateGradient(rtol=1e-3, preconditioner=inverse).solve(operator, b)
    assert set_up == 60
    assert abs(preconditioned.num_matvecs - set_up - reused.num_matvecs) <= 60  # other random numbers


def test_rank_deficient_operator(generator) -> None:
    factor = torch.randn(50, 5, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    b = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    solution = ConjugateGradient(rtol=1e-8, preconditioner=Nystrom(10)).solve(operator + DAMPING * identity, b)
    assert solution.converged
    assert solution.num_matvecs <= 10 + 3 * 4
    with pytest.raises(ValueError, match="no damping: add damping"):
        Nystrom(10).build(DenseOperator(torch.zeros(20, 20)))


def test_indefinite_is_refused(generator) -> None:
    operator = DenseOperator(torch.diag(torch.linspace(-1, 1, 20))) + 2.0 * identity
    with pytest.raises(IndefiniteOperatorError, match="minus its damping is not positive semi-definite"):
        Nystrom(15).build(operator, generator=generator)


def test_bad_rank() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1"):
        Nystrom(0)
