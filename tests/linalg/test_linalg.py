"""Operators, their algebra and dense forms, and flat vectors of parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import (
    DenseOperator,
    LinearOperator,
    flatten,
    flatten_columns,
    identity,
    unflatten,
    unflatten_columns,
)
from tests.refusals import refuses


@pytest.fixture
def symmetric(generator: torch.Generator) -> Tensor:
    """(7, 7), fp64, indefinite."""
    matrix = torch.randn(7, 7, dtype=torch.float64, generator=generator)
    return matrix + matrix.T


@pytest.fixture
def gram_matrices(generator: torch.Generator) -> Tensor:
    """(5, 4, 4), fp64, each of rank one and positive semi-definite."""
    rows = torch.randn(5, 4, 1, dtype=torch.float64, generator=generator)
    return rows @ rows.mT


def test_randn_is_standard_normal_seeded_and_leaves_the_global_state_alone() -> None:
    op, state = (3 * identity).like(DenseOperator(torch.eye(2000).double(), is_psd=True)), torch.get_rng_state()
    drawn = op.randn(5, torch.Generator().manual_seed(1))
    assert drawn.shape == (2000, 5)
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, op.randn(5, torch.Generator().manual_seed(1)))
    assert not torch.equal(drawn, op.randn(5, torch.Generator().manual_seed(2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(drawn.T @ drawn / 2000, torch.eye(5, dtype=torch.float64), rtol=0, atol=5 * (2 / 2000) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_scipy_keeps_shape_dtype_and_transpose(symmetric: Tensor, dtype: torch.dtype) -> None:
    matrix = symmetric.to(dtype)
    scipy_op = (DenseOperator(matrix) + 2.0 * identity).to_scipy()
    expected = matrix.numpy() + 2 * np.eye(7, dtype=matrix.numpy().dtype)
    block = np.linspace(-1, 1, 14, dtype=expected.dtype).reshape(2, 7).T  # not contiguous
    assert scipy_op.shape == (7, 7)
    assert scipy_op.dtype == expected.dtype
    assert scipy_op.matvec(block[:, :1]).shape == (7, 1)
    assert (scipy_op @ block[:, 0]).dtype == expected.dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(scipy_op @ block, expected @ block, **tolerance)
    np.testing.assert_allclose(scipy_op.T @ block[:, 0], expected @ block[:, 0], **tolerance)
    np.testing.assert_allclose((2 * scipy_op).H @ block, 2 * expected @ block, **tolerance)


def test_to_scipy_refuses_bfloat16_with_what_to_do(symmetric: Tensor) -> None:
    refuses(r"no bfloat16.*model\.float\(\)", DenseOperator(symmetric.bfloat16()).to_scipy, error=TypeError)


def test_an_operator_is_shown_by_kind_size_and_damping() -> None:
    op = DenseOperator(torch.eye(1200).double(), is_psd=True)
    assert repr(op) == "<DenseOperator over 1,200 parameters, damping 0, torch.float64 on cpu>"
    assert repr(op + 0.1 * identity) == "<SumOperator over 1,200 parameters, damping 0.1, torch.float64 on cpu>"


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 10_000])
def test_a_probe_has_few_numbers_and_tells_matrices_apart(size: int) -> None:
    class Diagonal(LinearOperator):
        def __init__(self, value: float) -> None:
            super().__init__(size, dtype=torch.float64, device="cpu")
            self.value = value

        def matmat(self, vectors: torch.Tensor) -> torch.Tensor:
            return self.value * vectors

    probe = Diagonal(2.0).probe()
    assert len(probe) <= 4097
    assert torch.equal(probe, Diagonal(2.0).probe())
    assert size == 0 or not torch.allclose(probe, Diagonal(2.001).probe())  # a rank may hold no row


# ----------------------------------------------------------------------------------------
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
        refuses(r"op \+ 0\.1 \* identity", add, error=TypeError)


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


def test_parts_of_a_sum_are_sampled_independently(gram_matrices: Tensor) -> None:
    op = DenseOperator(gram_matrices)
    difference = (op - op).sample(1, torch.Generator().manual_seed(3))
    assert difference.to_dense().abs().max() > 0


# ----------------------------------------------------------------------------------------
def test_psd_is_found_from_the_eigenvalues_or_taken_as_stated(symmetric: Tensor) -> None:
    assert not DenseOperator(symmetric).is_psd
    assert DenseOperator(symmetric @ symmetric).is_psd
    assert DenseOperator(torch.zeros(3, 3)).is_psd
    assert DenseOperator(torch.diag(torch.tensor([1.0, 0.0, 1e6]))).is_psd
    assert DenseOperator(symmetric, is_psd=True).is_psd


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3), (2, 2, 2, 2)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    refuses(r"\(P, P\) or \(N, P, P\)", DenseOperator, torch.zeros(shape))


def test_asymmetric_matrices_are_refused() -> None:
    refuses("not symmetric", DenseOperator, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


# ----------------------------------------------------------------------------------------
SHAPES = [(2, 3), (4,), (), (1, 2, 2)]
SIZE = 6 + 4 + 1 + 4


def test_flatten_is_row_major_and_in_order() -> None:
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(flatten([first, torch.tensor(5.0)]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert torch.equal(flatten([first.T]), torch.tensor([1.0, 3.0, 2.0, 4.0]))


def test_unflatten_inverts_flatten(generator: torch.Generator) -> None:
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for back, tensor in zip(unflatten(flatten(tensors), tensors), tensors, strict=True):
        assert torch.equal(back, tensor)


def test_columns_are_flattened_one_by_one(generator: torch.Generator) -> None:
    stacked = [torch.randn(3, *shape, generator=generator) for shape in SHAPES]
    columns = flatten_columns(stacked)
    assert columns.shape == (SIZE, 3)
    for k in range(3):
        assert torch.equal(columns[:, k], flatten([tensor[k] for tensor in stacked]))


def test_unflatten_columns_inverts_flatten_columns(generator: torch.Generator) -> None:
    like = [torch.empty(shape) for shape in SHAPES]
    columns = torch.randn(SIZE, 3, generator=generator)
    pieces = unflatten_columns(columns, like)
    assert [tuple(piece.shape) for piece in pieces] == [(3, *shape) for shape in SHAPES]
    assert_close(flatten_columns(pieces), columns, rtol=0, atol=0)


def test_no_columns() -> None:
    pieces = unflatten_columns(torch.zeros(SIZE, 0), [torch.empty(shape) for shape in SHAPES])
    assert flatten_columns(pieces).shape == (SIZE, 0)


def test_a_vector_of_another_length_is_refused() -> None:
    like = [torch.empty(shape) for shape in SHAPES]
    refuses("size", unflatten, torch.zeros(SIZE + 1), like, error=(ValueError, RuntimeError))
    refuses("size", unflatten_columns, torch.zeros(SIZE + 1, 2), like, error=(ValueError, RuntimeError))


def test_a_multiple_names_the_way_out_of_what_it_is_a_multiple_of() -> None:
    class Own(DenseOperator):
        way_out = "Use another loss."

    own = Own(torch.diag(torch.tensor([1.0, -1.0])))
    assert (0.5 * (own + own) + 0.1 * identity).way_out == "Use another loss."
    assert (-1.0 * own).way_out.startswith("Use GaussNewtonOperator")
