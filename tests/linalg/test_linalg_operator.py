import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import DenseOperator, LinearOperator, identity


class Tridiagonal(LinearOperator):
    """Smallest possible subclass: only a product. 2 on the diagonal, -1 beside it."""

    def matmat(self, vectors: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(vectors, (0, 0, 1, 1))
        return 2 * vectors - padded[:-2] - padded[2:]


def tridiagonal(size: int) -> Tridiagonal:
    return Tridiagonal(size, dtype=torch.float64, device="cpu")


def tridiagonal_matrix(size: int) -> Tensor:
    beside = torch.ones(size - 1, dtype=torch.float64)
    return 2 * torch.eye(size, dtype=torch.float64) - beside.diag(1) - beside.diag(-1)


def test_shape_dtype_and_device_are_those_given() -> None:
    op = tridiagonal(6)
    assert (op.shape, op.dtype, op.device) == ((6, 6), torch.float64, torch.device("cpu"))


def test_one_product_gives_matvec_and_matmat(generator: torch.Generator) -> None:
    op, dense = tridiagonal(6), tridiagonal_matrix(6)
    vectors = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    assert_close(op @ vectors, dense @ vectors)
    assert_close(op @ vectors[:, 1], dense @ vectors[:, 1])
    assert (op @ vectors[:, 1]).shape == (6,)
    assert_close(op.matvec(vectors[:, 0]), op.matmat(vectors)[:, 0])


def test_no_columns_give_no_columns() -> None:
    assert (tridiagonal(6) @ torch.zeros(6, 0, dtype=torch.float64)).shape == (6, 0)


@pytest.mark.parametrize("chunk_size", [1, 4, 6, 100])
def test_to_dense_in_chunks(chunk_size: int) -> None:
    assert_close(tridiagonal(6).to_dense(chunk_size=chunk_size), tridiagonal_matrix(6), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5,), (7,), (5, 6), (1, 6), (6, 2, 1), ()])
def test_wrong_length_is_refused_with_both_lengths(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"right-hand side.*Tridiagonal acts on vectors of length 6"):
        tridiagonal(6) @ torch.zeros(shape, dtype=torch.float64)


def test_wrong_dtype_is_refused_with_the_conversion() -> None:
    with pytest.raises(ValueError, match=r"float32.*float64.*\.to\("):
        tridiagonal(6) @ torch.zeros(6)


def test_inner_products(generator: torch.Generator) -> None:
    op = tridiagonal(6)
    left = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    right = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    by_hand = torch.tensor([[sum(a * b for a, b in zip(x, y, strict=True)) for y in right.T] for x in left.T])
    assert_close(op.gram(left, right), by_hand.double())
    assert_close(op.inner(left, right), by_hand.double().diagonal())
    assert_close(op.inner(left[:, 0], right[:, 0]), by_hand.double()[0, 0])
    assert op.inner(left[:, 0], right[:, 0]).shape == ()
    assert_close(op.norm(left), torch.linalg.vector_norm(left, dim=0))
    assert op.gram(left, right[:, :2]).shape == (3, 2)


def test_randn_is_standard_normal_seeded_and_leaves_the_global_state_alone() -> None:
    op, state = tridiagonal(2000), torch.get_rng_state()
    drawn = op.randn(5, torch.Generator().manual_seed(1))
    assert drawn.shape == (2000, 5)
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, op.randn(5, torch.Generator().manual_seed(1)))
    assert not torch.equal(drawn, op.randn(5, torch.Generator().manual_seed(2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(drawn.T @ drawn / 2000, torch.eye(5, dtype=torch.float64), rtol=0, atol=5 * (2 / 2000) ** 0.5)


def test_more_columns_extend_the_same_vectors() -> None:
    op = tridiagonal(16)  # large enough for torch to draw its normals in blocks
    few, many = (op.randn(k, torch.Generator().manual_seed(1)) for k in (2, 4))
    assert torch.equal(few, many[:, :2])


def test_an_operator_without_data_says_so_when_sampled(generator: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match=r"Tridiagonal has no data.*ConjugateGradient"):
        tridiagonal(6).sample(3, generator)


def test_psd_is_not_claimed_unless_known() -> None:
    assert tridiagonal(3).is_psd is False
    assert tridiagonal(3).damping == 0.0


def test_to_scipy_finds_the_eigenvalues(symmetric: Tensor) -> None:
    scipy_op = DenseOperator(symmetric).to_scipy()
    found = np.sort(eigsh(scipy_op, k=3, which="LA", return_eigenvectors=False))
    np.testing.assert_allclose(found, torch.linalg.eigvalsh(symmetric)[-3:].numpy(), rtol=1e-10)


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
    with pytest.raises(TypeError, match=r"no bfloat16.*model\.float\(\)"):
        DenseOperator(symmetric.bfloat16()).to_scipy()
