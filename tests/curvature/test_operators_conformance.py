"""What every operator must do: a new one is one line in OPERATORS."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import Ekfac, Nystrom
from tests.curvature.curvature_cases import language_problem, problem
from tests.curvature.curvature_oracles import (
    dense_empirical_fisher,
    dense_exact_fisher,
    dense_gauss_newton,
    dense_hessian,
)
from tests.refusals import refuses

DAMPING = 0.1


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


EXAMPLES = normals(6, 8, 2) @ normals(6, 8, 2).mT  # six (8, 8) matrices of rank 2
INDEFINITE = normals(8, 8) + normals(8, 8).T
CLASSIFIER, TOKENS = problem("mlp_tanh", "ce"), language_problem("mean")
ZEROS = nn.Linear(4, 1, bias=False).double()  # p = 1/2 whatever the input: one Kronecker product is exact
nn.init.zeros_(ZEROS.weight)
BINARY = (nn.BCEWithLogitsLoss(), (normals(9, 4), torch.zeros(9, 1, dtype=torch.float64)))


class Tridiagonal(LinearOperator):
    """Smallest possible subclass: only a product. 2 on the diagonal, -1 beside it."""

    def matmat(self, vectors: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(vectors, (0, 0, 1, 1))
        return 2 * vectors - padded[:-2] - padded[2:]


def tridiagonal_matrix(size: int) -> Tensor:
    beside = torch.ones(size - 1, dtype=torch.float64)
    return 2 * torch.eye(size, dtype=torch.float64) - beside.diag(1) - beside.diag(-1)


def dense_monte_carlo(*case) -> Tensor:
    """The empirical Fisher matrix of the labels that were drawn."""
    ((inputs, drawn),) = monte_carlo(*case).batches
    return dense_empirical_fisher(*list(case)[:2], inputs, drawn)


def monte_carlo(*case) -> FisherOperator:
    return FisherOperator(*case, kind="monte_carlo", generator=torch.Generator().manual_seed(0))


def inverse_of(matrix: Tensor) -> Tensor:
    return torch.linalg.inv(matrix + DAMPING * torch.eye(len(matrix), dtype=torch.float64))


@dataclass(frozen=True)
class Case:
    """How an operator is built, its matrix by other means, and how far the two may be apart."""

    build: Callable[[], LinearOperator]
    matrix: Callable[[], Tensor]
    rtol: float = 1e-10


def of_data(
    build: Callable[..., LinearOperator], oracle: Callable[..., Tensor], case, rtol: float = 1e-10
) -> Case:
    return Case(lambda: build(*case), lambda: oracle(case.model, case.loss, case.inputs, case.targets), rtol)


def finite_differences(*case) -> GaussNewtonOperator:
    return GaussNewtonOperator(*case, jvp="finite_difference")


def empirical(*case) -> FisherOperator:
    return FisherOperator(*case, kind="empirical")


OPERATORS: dict[str, Case] = {
    "only a product": Case(
        lambda: Tridiagonal(8, dtype=torch.float64, device="cpu"), lambda: tridiagonal_matrix(8)
    ),
    "dense": Case(lambda: DenseOperator(INDEFINITE), lambda: INDEFINITE),
    "dense, of examples": Case(lambda: DenseOperator(EXAMPLES), lambda: sum(EXAMPLES) / 6),
    "identity": Case(lambda: (3 * identity).like(DenseOperator(INDEFINITE)), lambda: 3 * torch.eye(8).double()),
    "multiple": Case(lambda: -2 * DenseOperator(EXAMPLES), lambda: -2 * EXAMPLES.mean(0)),
    "sum": Case(
        lambda: DenseOperator(INDEFINITE @ INDEFINITE) + DenseOperator(tridiagonal_matrix(8)),
        lambda: INDEFINITE @ INDEFINITE + tridiagonal_matrix(8),
    ),
    "sum of multiples of data operators": Case(
        lambda: GaussNewtonOperator(*CLASSIFIER) - 0.5 * empirical(*CLASSIFIER),
        lambda: oracle(dense_gauss_newton) - 0.5 * oracle(dense_empirical_fisher),
    ),
    "gauss-newton": of_data(GaussNewtonOperator, dense_gauss_newton, CLASSIFIER),
    "gauss-newton, finite differences": of_data(finite_differences, dense_gauss_newton, CLASSIFIER, 1e-6),
    "gauss-newton, tokens": of_data(GaussNewtonOperator, dense_gauss_newton, TOKENS),
    "hessian": of_data(HessianOperator, dense_hessian, CLASSIFIER),
    "hessian, tokens": of_data(HessianOperator, dense_hessian, TOKENS),
    "fisher, exact": of_data(FisherOperator, dense_exact_fisher, CLASSIFIER),
    "fisher, empirical": of_data(empirical, dense_empirical_fisher, CLASSIFIER),
    "fisher, empirical, tokens": of_data(empirical, dense_empirical_fisher, TOKENS),
    "fisher, monte carlo": Case(lambda: monte_carlo(*CLASSIFIER), lambda: dense_monte_carlo(*CLASSIFIER)),
    "inverse, nystrom": Case(
        lambda: Nystrom(8).build(DenseOperator(EXAMPLES.mean(0)) + DAMPING * identity)[0],
        lambda: inverse_of(EXAMPLES.mean(0)),
    ),
    "inverse, kronecker": Case(
        lambda: Ekfac().build(GaussNewtonOperator(ZEROS, *BINARY) + DAMPING * identity)[0],
        lambda: inverse_of(dense_gauss_newton(ZEROS, BINARY[0], *BINARY[1])),
    ),
}


def oracle(dense: Callable[..., Tensor]) -> Tensor:
    return dense(CLASSIFIER.model, CLASSIFIER.loss, CLASSIFIER.inputs, CLASSIFIER.targets)


@dataclass(frozen=True)
class Built:
    op: LinearOperator
    matrix: Tensor
    vectors: Tensor
    tolerance: dict[str, float]


@pytest.fixture(scope="module", params=list(OPERATORS))
def built(request: pytest.FixtureRequest) -> Built:
    case = OPERATORS[request.param]
    op, matrix = case.build(), case.matrix()
    tolerance = {"rtol": case.rtol, "atol": case.rtol * matrix.abs().max().item()}
    return Built(op, matrix, op.randn(3, torch.Generator().manual_seed(1)), tolerance)


def test_is_the_matrix_of_the_oracle(built: Built) -> None:
    op, matrix = built.op, built.matrix
    assert (op.shape, op.dtype, op.device) == (tuple(matrix.shape), torch.float64, torch.device("cpu"))
    dense = op.to_dense()
    assert_close(dense, matrix, **built.tolerance)
    assert_close(dense, op.to_dense(chunk_size=5), **built.tolerance)


def test_is_symmetric_and_linear(built: Built) -> None:
    op, (u, v, w) = built.op, built.vectors.T
    scale = built.matrix.norm().item() * u.norm().item() * v.norm().item()
    assert abs(float(op.inner(u, op @ v) - op.inner(op @ u, v))) <= built.tolerance["rtol"] * scale
    combined = 2 * (op @ u) - 0.5 * (op @ w)
    assert_close(op @ (2 * u - 0.5 * w), combined, rtol=0, atol=100 * built.tolerance["atol"])


def test_is_positive_semi_definite_where_it_says_so(built: Built) -> None:
    values = torch.linalg.eigvalsh(built.matrix)
    if built.op.is_psd:
        assert values[0] >= -1e-10 * values[-1]


def test_many_columns_are_single_columns(built: Built) -> None:
    op, vectors = built.op, built.vectors
    together = op @ vectors
    single = torch.stack([op @ v for v in vectors.T], dim=1)
    tolerance = {"rtol": 1e-10, "atol": 10 * built.tolerance["atol"]}
    assert_close(together, single, **tolerance)
    assert_close(together, op @ vectors.clone(memory_format=torch.contiguous_format), **tolerance)
    assert_close(op @ vectors[:, :1], together[:, :1], **tolerance)
    assert (op @ vectors[:, 0]).shape == (op.shape[0],)
    assert (op @ vectors[:, :0]).shape == (op.shape[0], 0)
    assert not together.requires_grad


def test_algebra_is_that_of_the_matrices(built: Built) -> None:
    op, matrix, vectors = built.op, built.matrix, built.vectors
    tolerance = {"rtol": built.tolerance["rtol"], "atol": 100 * built.tolerance["atol"]}
    damped = 2 * op + DAMPING * identity
    assert_close(damped @ vectors, 2 * matrix @ vectors + DAMPING * vectors, **tolerance)
    assert_close((op - 3 * op) @ vectors, -2 * matrix @ vectors, **tolerance)
    assert damped.damping == pytest.approx(2 * op.damping + DAMPING)
    assert damped.is_psd == op.is_psd
    assert damped.num_examples == op.num_examples
    assert_close(damped.inner(vectors, vectors), op.inner(vectors, vectors))


def test_inner_products_and_random_vectors(built: Built) -> None:
    op, vectors = built.op, built.vectors
    by_hand = torch.tensor([[sum(a * b for a, b in zip(x, y, strict=True)) for y in vectors.T] for x in vectors.T])
    assert_close(op.gram(vectors, vectors[:, :2]), by_hand.double()[:, :2])
    assert_close(op.inner(vectors, vectors), by_hand.double().diagonal())
    assert_close(op.norm(vectors[:, 0]), by_hand.double()[0, 0].sqrt())
    assert torch.equal(op.randn(3, torch.Generator().manual_seed(1)), vectors)
    if op.shape[0] % 16 == 0:  # torch draws normals in blocks of 16, and a last, shorter one anew
        assert torch.equal(op.randn(2, torch.Generator().manual_seed(1)), vectors[:, :2])


@pytest.mark.parametrize("length", [-1, 1])
def test_wrong_lengths_are_refused(built: Built, length: int) -> None:
    size = built.op.shape[0]
    for shape in ((size + length,), (size + length, 2), (1, size), (size, 2, 1), ()):
        with pytest.raises(ValueError, match=rf"right-hand side has shape.*acts on vectors of length {size}:"):
            built.op @ torch.zeros(shape, dtype=torch.float64)


def test_wrong_dtype_and_device_are_refused_with_the_conversion(built: Built) -> None:
    size = built.op.shape[0]
    with pytest.raises(ValueError, match=r"float32.*float64.*\.to\("):
        built.op @ torch.zeros(size)
    with pytest.raises(ValueError, match=r"on meta.*on cpu.*\.to\("):
        built.op @ torch.zeros(size, dtype=torch.float64, device="meta")


def test_scipy_finds_its_eigenvalues(built: Built) -> None:
    scipy_op = built.op.to_scipy()
    values = np.linalg.eigvalsh(built.matrix.numpy())
    tolerance = max(1e-8, 10 * built.tolerance["rtol"]) * np.abs(values).max()
    if np.ptp(values) < tolerance:  # a multiple of the identity, on which Lanczos iterations stop at once
        np.testing.assert_allclose(scipy_op @ np.eye(len(values)), built.matrix.numpy(), atol=tolerance)
        return
    found = np.sort(eigsh(scipy_op, k=2, which="LA", return_eigenvectors=False))
    np.testing.assert_allclose(found, values[-2:], rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------- sampling
def test_samples_are_unbiased_or_refused(built: Built) -> None:
    op, generator = built.op, torch.Generator().manual_seed(2)
    if op.num_examples is None and not torch.equal(built.matrix, 3 * torch.eye(8).double()):
        refuses(r"has no data to sample.*ConjugateGradient", op.sample, 2, generator, error=NotImplementedError)
        return
    vector, num_samples = built.vectors[:, 0], 60
    samples = torch.stack([op.sample(2, generator) @ vector for _ in range(num_samples)])
    stderr = samples.std(0) / num_samples**0.5
    slack = 10 * built.tolerance["rtol"] * (built.matrix @ vector).abs().max()
    assert ((samples.mean(0) - built.matrix @ vector).abs() <= 5 * stderr + slack).all()


def test_a_sample_is_an_operator_like_the_whole(built: Built) -> None:
    op = built.op
    if op.num_examples is None:
        pytest.skip("no data")
    first, again, other = (op.sample(3, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert (first.shape, first.dtype, first.num_examples) == (op.shape, op.dtype, op.num_examples)
    assert first.is_psd == op.is_psd
    products = [sample @ built.vectors for sample in (first, again, other)]
    assert torch.equal(products[0], products[1])
    assert not torch.equal(products[0], products[2])
    damped = (op + DAMPING * identity).sample(3, torch.Generator().manual_seed(7))
    assert damped.damping == DAMPING
    assert op.sample(op.num_examples + 2, torch.Generator().manual_seed(0)).shape == op.shape


def test_chance_comes_from_the_generator_alone(built: Built) -> None:
    state = torch.get_rng_state()
    _ = built.op @ built.vectors, built.op.randn(2, torch.Generator())
    if built.op.num_examples is not None:
        _ = built.op.sample(2, torch.Generator()) @ built.vectors
    assert torch.equal(torch.get_rng_state(), state)
