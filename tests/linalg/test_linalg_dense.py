import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import DenseOperator


def test_psd_is_found_from_the_eigenvalues_or_taken_as_stated(symmetric: Tensor) -> None:
    assert not DenseOperator(symmetric).is_psd
    assert DenseOperator(symmetric @ symmetric).is_psd
    assert DenseOperator(torch.zeros(3, 3)).is_psd
    assert DenseOperator(torch.diag(torch.tensor([1.0, 0.0, 1e6]))).is_psd
    assert DenseOperator(symmetric, is_psd=True).is_psd


def test_sample_is_the_mean_of_drawn_matrices(gram_matrices: Tensor) -> None:
    op = DenseOperator(gram_matrices)
    sample = op.sample(3, torch.Generator().manual_seed(1)).to_dense()
    # the five rank-one matrices are linearly independent, so the counts can be read off
    counts = torch.linalg.lstsq(gram_matrices.flatten(1).T, 3 * sample.flatten()[:, None]).solution[:, 0]
    assert_close(counts, counts.round(), rtol=0, atol=1e-8)
    assert_close(counts.sum().item(), 3.0)
    assert torch.equal(sample, op.sample(3, torch.Generator().manual_seed(1)).to_dense())
    assert op.sample(3, torch.Generator().manual_seed(1)).is_psd


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3), (2, 2, 2, 2)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(P, P\) or \(N, P, P\)"):
        DenseOperator(torch.zeros(shape))


def test_asymmetric_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="not symmetric"):
        DenseOperator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
