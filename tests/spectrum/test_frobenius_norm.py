import pytest
import torch

from curvlab.linalg import DenseOperator
from curvlab.spectrum import frobenius_norm


@pytest.mark.parametrize("spectrum", ["flat", "decaying", "indefinite"])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
def test_intervals_cover_dense_norm(build_matrix, spectrum: str, distribution: str) -> None:
    matrix = build_matrix(spectrum, 60)
    generator = torch.Generator().manual_seed(2)
    covered = 0
    for _ in range(200):
        estimate = frobenius_norm(
            DenseOperator(matrix), num_matvecs=60, distribution=distribution, generator=generator
        )
        covered += abs(estimate.value - float(matrix.norm())) <= 2.0 * estimate.stderr + 1e-12
    exact = spectrum == "flat" and distribution == "rademacher"
    assert 180 <= covered <= (200 if exact else 198)


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_two_batches_are_unbiased_where_one_is_not(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(100, 15, generator=generator, dtype=torch.float64)
    factors = factors * torch.arange(1, 16, dtype=torch.float64) ** -decay
    examples = factors[:, :, None] * factors[:, None, :]
    operator, truth = DenseOperator(examples, is_psd=True), float(examples.mean(0).norm())
    covered, one_batch = 0, []
    for _ in range(200):
        estimate = frobenius_norm(operator, num_matvecs=120, batch_size=5, generator=generator)
        assert estimate.num_matvecs == 120
        covered += abs(estimate.value - truth) <= 2.0 * estimate.stderr
        one_batch.append(float((operator.sample(5, generator).matrix ** 2).sum()))
    assert 180 <= covered <= 198
    assert sum(one_batch) / 200 > 2 * truth**2  # what a single batch would have given


def test_noise_alone_gives_zero_and_a_large_error() -> None:
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(50, 8, 8, generator=generator, dtype=torch.float64)
    examples = examples + examples.transpose(1, 2)
    operator = DenseOperator(examples - examples.mean(0))
    estimates = [frobenius_norm(operator, num_matvecs=6, batch_size=1, generator=generator) for _ in range(20)]
    assert any(estimate.value == 0 for estimate in estimates)
    assert all(0 < estimate.stderr < float("inf") for estimate in estimates)


def test_too_few_products_are_refused() -> None:
    with pytest.raises(ValueError, match="need at least 2 products"):
        frobenius_norm(DenseOperator(torch.ones(2, 3, 3)), num_matvecs=1, batch_size=4)
