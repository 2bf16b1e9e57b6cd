"""Hutch++ and XTrace: what both must do."""

import pytest
import torch

from curvlab.linalg import DenseOperator
from curvlab.spectrum import hutchinson_trace, hutchpp_trace, xtrace

ESTIMATORS = {"hutchpp": hutchpp_trace, "xtrace": xtrace}
# So that each has at least 30 independent (or exchangeable) samples.
NUM_MATVECS = {"hutchpp": 96, "xtrace": 64}
QUANTILE = {"hutchpp": 2.04, "xtrace": 2.04}  # t, 31 degrees of freedom


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("spectrum", ["nearly flat", "decaying", "indefinite", "repeated"])
def test_intervals_cover_dense_trace(build_matrix, name: str, spectrum: str) -> None:
    matrix = build_matrix(spectrum, 150)
    operator, truth = DenseOperator(matrix), float(matrix.trace())
    generator = torch.Generator().manual_seed(3)
    covered, errors = 0, []
    for _ in range(200):
        estimate = ESTIMATORS[name](operator, num_matvecs=NUM_MATVECS[name], generator=generator)
        assert estimate.num_matvecs == NUM_MATVECS[name]
        errors.append(estimate.value - truth)
        covered += abs(estimate.value - truth) <= QUANTILE[name] * estimate.stderr
    assert 180 <= covered <= 198
    mean, spread = torch.tensor(errors).mean(), torch.tensor(errors).std()
    assert abs(mean) < 4 * spread / 200**0.5  # unbiased


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_exact_on_low_rank(build_matrix, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T
    estimate = ESTIMATORS[name](DenseOperator(matrix), num_matvecs=30, generator=generator)
    assert estimate.value == pytest.approx(float(matrix.trace()), rel=1e-10)
    assert estimate.stderr < 1e-9 * estimate.value


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_beats_hutchinson_on_decaying_spectra(build_matrix, name: str) -> None:
    operator = DenseOperator(build_matrix("exponential", 150))
    generator = torch.Generator().manual_seed(0)
    plain = hutchinson_trace(operator, num_matvecs=60, generator=generator)
    deflated = ESTIMATORS[name](operator, num_matvecs=60, generator=generator)
    assert deflated.stderr < 0.02 * plain.stderr
    # No more digits than rounding allows, but all of those: no hidden bias where the noise is tiny.
    truth = float(operator.matrix.trace())
    assert abs(deflated.value - truth) < 6 * deflated.stderr + 1e-12


@pytest.mark.parametrize("num_matvecs", [6, 64, 200])
def test_xtrace_is_exact_on_the_identity(num_matvecs: int) -> None:
    operator = DenseOperator(2 * torch.eye(60, dtype=torch.float64))
    estimate = xtrace(operator, num_matvecs=num_matvecs, generator=torch.Generator().manual_seed(0))
    assert estimate.value == pytest.approx(120.0, rel=1e-10)
    assert estimate.num_matvecs <= 120


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_too_few_products_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_matvecs must be at least"):
        ESTIMATORS[name](DenseOperator(torch.eye(5)), num_matvecs=3)
