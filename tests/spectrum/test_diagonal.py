import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator
from curvlab.spectrum import hutchinson_diagonal


def test_intervals_cover_the_dense_diagonal(matrix: Tensor) -> None:
    operator, truth = DenseOperator(matrix), matrix.diagonal()
    generator = torch.Generator().manual_seed(1)
    covered, errors = [], []
    for _ in range(200):
        found = hutchinson_diagonal(operator, num_matvecs=40, chunk_size=16, generator=generator)
        covered.append((found.values - truth).abs() <= 2.023 * found.stderr + 1e-10)  # t, 39 degrees of freedom
        errors.append(found.values - truth)
    assert float(torch.stack(covered).double().mean()) >= 0.93
    spread = torch.stack(errors).std(0) / 200**0.5
    assert bool((torch.stack(errors).mean(0).abs() < 4.5 * spread + 1e-10).all())  # unbiased, entry by entry


def test_variance_is_the_known_one(build_matrix) -> None:
    matrix = build_matrix("decaying", 60)
    generator = torch.Generator().manual_seed(0)
    found = hutchinson_diagonal(DenseOperator(matrix), num_matvecs=4000, generator=generator)
    variance = matrix.square().sum(1) - matrix.diagonal().square()
    torch.testing.assert_close(4000 * found.stderr.square(), variance, rtol=0.25, atol=0)
    assert found.num_matvecs == 4000


def test_chunks_change_nothing_but_rounding_and_a_long_mean_does_not_cancel(build_matrix) -> None:
    off_diagonal = build_matrix("decaying", 32).fill_diagonal_(0)  # torch.randn draws blocks of 16 numbers
    matrix = off_diagonal + 1e8 * torch.eye(32, dtype=torch.float64)
    found = [
        hutchinson_diagonal(
            DenseOperator(matrix), num_matvecs=50, chunk_size=size, generator=torch.Generator().manual_seed(0)
        )
        for size in (1, 7, 50)
    ]
    expected = off_diagonal.norm(dim=1) / 50**0.5
    for other in found:
        torch.testing.assert_close(other.values, found[0].values, rtol=1e-14, atol=0)
        torch.testing.assert_close(other.stderr, found[0].stderr, rtol=1e-4, atol=0)
        assert 0.5 < float((other.stderr / expected).mean()) < 1.5


def test_a_diagonal_matrix_is_exact_one_probe_has_no_error_and_none_is_refused() -> None:
    operator = DenseOperator(torch.diag(torch.arange(5.0)))
    found = hutchinson_diagonal(operator, num_matvecs=2)
    assert found.values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.stderr.tolist() == [0.0] * 5
    assert bool(hutchinson_diagonal(operator, num_matvecs=1).stderr.isnan().all())
    assert "no error: a single probe" in repr(hutchinson_diagonal(operator, num_matvecs=1))
    with pytest.raises(ValueError, match="need num_matvecs >= 1"):
        hutchinson_diagonal(operator, num_matvecs=0)
