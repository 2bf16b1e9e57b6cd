import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.linalg import DenseOperator


def test_product_is_that_of_the_matrix(symmetric: Tensor) -> None:
    op = DenseOperator(symmetric)
    assert_close(op.to_dense(), symmetric, rtol=0, atol=0)
    assert_close(op @ symmetric[:, 0], symmetric @ symmetric[:, 0])


def test_a_stack_stands_for_its_mean(gram_matrices: Tensor) -> None:
    assert_close(DenseOperator(gram_matrices).to_dense(), sum(gram_matrices) / 5)


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


def test_sample_is_unbiased(gram_matrices: Tensor, generator: torch.Generator) -> None:
    op = DenseOperator(gram_matrices, is_psd=True)
    samples = torch.stack([op.sample(2, generator).to_dense() for _ in range(2000)])
    stderr = samples.std(0) / 2000**0.5
    assert ((samples.mean(0) - op.to_dense()).abs() < 5 * stderr).all()


def test_one_matrix_cannot_be_sampled(symmetric: Tensor, generator: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match="no data to sample"):
        DenseOperator(symmetric).sample(2, generator)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3), (2, 2, 2, 2)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(P, P\) or \(N, P, P\)"):
        DenseOperator(torch.zeros(shape))


def test_asymmetric_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="not symmetric"):
        DenseOperator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
