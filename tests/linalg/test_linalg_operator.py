import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import DenseOperator, LinearOperator, identity


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
    with pytest.raises(TypeError, match=r"no bfloat16.*model\.float\(\)"):
        DenseOperator(symmetric.bfloat16()).to_scipy()


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
