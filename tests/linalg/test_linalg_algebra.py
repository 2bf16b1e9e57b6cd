import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import DenseOperator, LinearOperator, identity


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        pytest.param(lambda a, b: a + b, lambda a, b: a + b, id="sum"),
        pytest.param(lambda a, b: a - b, lambda a, b: a - b, id="difference"),
        pytest.param(lambda a, b: -a, lambda a, b: -a, id="negative"),
        pytest.param(lambda a, b: 2 * a, lambda a, b: 2 * a, id="left multiple"),
        pytest.param(lambda a, b: a * 0.5, lambda a, b: a / 2, id="right multiple"),
        pytest.param(lambda a, b: -2 * (a + 3 * b), lambda a, b: -2 * a - 6 * b, id="multiple of a sum"),
        pytest.param(lambda a, b: a + (b + a) + b, lambda a, b: 2 * a + 2 * b, id="sum of sums"),
        pytest.param(lambda a, b: a + 0.1 * identity, lambda a, b: a + 0.1 * eye(7), id="damping"),
        pytest.param(lambda a, b: identity * 0.1 + a, lambda a, b: a + 0.1 * eye(7), id="identity first"),
        pytest.param(lambda a, b: a + identity + 2 * identity, lambda a, b: a + 3 * eye(7), id="damping twice"),
        pytest.param(lambda a, b: a - 0.5 * identity, lambda a, b: a - eye(7) / 2, id="negative damping"),
        pytest.param(
            lambda a, b: 3 * (a + 0.5 * identity) + b, lambda a, b: 3 * a + 1.5 * eye(7) + b, id="scaled damped"
        ),
        pytest.param(lambda a, b: sum([b, a], 0.0 * a), lambda a, b: a + b, id="builtin sum"),
    ],
)
def test_algebra_is_that_of_the_matrices(symmetric: Tensor, generator: torch.Generator, build, expected) -> None:
    other = torch.diag(torch.arange(7.0, dtype=torch.float64))
    op = build(DenseOperator(symmetric), DenseOperator(other))
    vectors = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    assert isinstance(op, LinearOperator)
    assert_close(op.to_dense(), expected(symmetric, other))
    assert_close(op @ vectors, expected(symmetric, other) @ vectors)
    assert_close(op @ vectors[:, 0], expected(symmetric, other) @ vectors[:, 0])


@pytest.mark.parametrize("number", [torch.tensor(0.25, dtype=torch.float64), 1])
def test_damping_may_be_any_real_number(symmetric: Tensor, number: float) -> None:
    op = DenseOperator(symmetric) + number * identity
    assert_close(op.to_dense(), symmetric + float(number) * eye(7))


def test_operands_are_left_unchanged(symmetric: Tensor) -> None:
    op = DenseOperator(symmetric) + 0.1 * identity
    _ = op + 5.0 * identity, 2 * op, -op
    assert_close(op.to_dense(), symmetric + 0.1 * eye(7))
    assert identity.scale == 1.0


def test_damping_is_what_was_added(symmetric: Tensor) -> None:
    op = DenseOperator(symmetric)
    assert op.damping == 0.0
    assert (op + 0.5 * identity).damping == 0.5
    assert (op + 0.5 * identity + 0.25 * identity).damping == 0.75
    assert (2 * (op + 0.5 * identity)).damping == 1.0
    assert (op + op).damping == 0.0


@pytest.mark.parametrize(
    ("build", "is_psd"),
    [
        (lambda psd, indefinite: psd + psd, True),
        (lambda psd, indefinite: psd + 0.1 * identity, True),
        (lambda psd, indefinite: 0.5 * psd, True),
        (lambda psd, indefinite: -psd, False),
        (lambda psd, indefinite: psd - 0.1 * identity, False),
        (lambda psd, indefinite: psd + indefinite, False),
        (lambda psd, indefinite: indefinite + 0.1 * identity, False),
    ],
)
def test_psd_survives_exactly_the_algebra_that_keeps_it(symmetric: Tensor, build, is_psd: bool) -> None:
    assert build(DenseOperator(symmetric @ symmetric), DenseOperator(symmetric)).is_psd is is_psd


def test_different_sizes_and_dtypes_do_not_add(symmetric: Tensor) -> None:
    op = DenseOperator(symmetric)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(7, 7\).*same parameters"):
        op + DenseOperator(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"float32.*float64"):
        op + DenseOperator(symmetric.float())


@pytest.mark.parametrize("number", [0.1, 1])
def test_adding_a_bare_number_is_refused_with_how_damping_is_written(symmetric: Tensor, number: float) -> None:
    op = DenseOperator(symmetric)
    for add in (lambda: op + number, lambda: number + op, lambda: op - number, lambda: identity + number):
        with pytest.raises(TypeError, match=r"op \+ 0\.1 \* identity"):
            add()


def test_adding_a_matrix_is_refused_with_how_it_becomes_an_operator(symmetric: Tensor) -> None:
    with pytest.raises(TypeError, match=r"Tensor.*DenseOperator makes"):
        DenseOperator(symmetric) + symmetric


class Weighted(DenseOperator):
    """An operator with an inner product and random vectors of its own, as a sharded one has."""

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        return 10 * super().gram(left, right)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        return 10 * super().inner(left, right)

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        return 10 * super().randn(num_columns, generator)


@pytest.mark.parametrize(
    "wrap", [lambda op: 2.0 * op, lambda op: op + 0.1 * identity, lambda op: -(op + op), lambda op: identity + op]
)
def test_inner_products_and_random_vectors_stay_those_of_the_operator(symmetric: Tensor, wrap) -> None:
    op = wrap(Weighted(symmetric))
    vectors = eye(7)[:, :2]
    assert_close(op.gram(vectors, vectors), 10 * eye(2))
    assert_close(op.inner(vectors, vectors), 10 * torch.ones(2, dtype=torch.float64))
    assert_close(op.norm(vectors[:, 0]), torch.tensor(10.0, dtype=torch.float64).sqrt())
    plain = DenseOperator(symmetric).randn(2, torch.Generator().manual_seed(0))
    assert_close(op.randn(2, torch.Generator().manual_seed(0)), 10 * plain)


def test_a_sum_samples_its_parts_and_keeps_the_damping(gram_matrices: Tensor) -> None:
    op = DenseOperator(gram_matrices)
    sampled = (3 * op + 0.5 * identity).sample(2, torch.Generator().manual_seed(4))
    alone = op.sample(2, torch.Generator().manual_seed(4))
    assert sampled.damping == 0.5
    assert_close(sampled.to_dense(), 3 * alone.to_dense() + 0.5 * eye(4))


def test_parts_of_a_sum_are_sampled_independently(gram_matrices: Tensor) -> None:
    op = DenseOperator(gram_matrices)
    difference = (op - op).sample(1, torch.Generator().manual_seed(3))
    assert difference.to_dense().abs().max() > 0
