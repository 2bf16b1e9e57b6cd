"""Traces and diagonals by random probes: unbiased, their errors true, deflated, several vectors at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.spectrum import (
    Estimate,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp_trace,
    sketch_eigenvalues,
    xtrace,
)
from curvlab.spectrum.eigenvalues import vectors_that_fit
from tests.curvature.curvature_oracles import Memory
from tests.matrices import CountingOperator
from tests.refusals import refuses


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_intervals_cover_dense_trace(matrix: Tensor, distribution: str) -> None:
    operator, truth = DenseOperator(matrix), float(matrix.trace())
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        estimate = hutchinson_trace(operator, num_matvecs=40, distribution=distribution, generator=generator)
        covered += abs(estimate.value - truth) <= 2.023 * estimate.stderr + 1e-10  # t, 39 degrees of freedom
    assert 180 <= covered <= 200
    if float(matrix.norm() ** 2 - matrix.diagonal().norm() ** 2) > 1e-6:  # else signs are exact
        assert covered <= 198


def test_variance_is_the_known_one(build_matrix) -> None:
    matrix = build_matrix("decaying", 60)
    num = 4000
    for distribution, variance in (
        ("gaussian", 2 * (matrix**2).sum()),
        ("rademacher", 2 * ((matrix**2).sum() - (matrix.diagonal() ** 2).sum())),
    ):
        generator = torch.Generator().manual_seed(0)
        estimate = hutchinson_trace(
            DenseOperator(matrix), num_matvecs=num, distribution=distribution, generator=generator
        )
        assert num * estimate.stderr**2 == pytest.approx(float(variance), rel=0.15)


def test_diagonal_matrix_is_exact_with_signs() -> None:
    operator = DenseOperator(torch.diag(torch.arange(5.0, dtype=torch.float64)))
    estimate = hutchinson_trace(operator, num_matvecs=3, generator=torch.Generator().manual_seed(0))
    assert estimate.value == 10.0
    assert estimate.stderr == 0.0


@pytest.mark.parametrize("rtol", [0.2, 0.05])
def test_stops_on_relative_standard_error(build_matrix, rtol: float) -> None:
    operator = CountingOperator(build_matrix("decaying", 60))
    generator = torch.Generator().manual_seed(0)
    estimate = hutchinson_trace(operator, rtol=rtol, chunk_size=5, generator=generator)
    assert estimate.stderr <= rtol * estimate.value
    assert estimate.num_matvecs == operator.columns
    assert 10 <= estimate.num_matvecs < 10_000


def test_limit_on_products_is_kept_and_stderr_tells(build_matrix) -> None:
    operator = CountingOperator(build_matrix("decaying", 60))
    estimate = hutchinson_trace(operator, rtol=1e-6, max_matvecs=70, generator=torch.Generator().manual_seed(0))
    assert estimate.num_matvecs == operator.columns == 70
    assert estimate.stderr > 1e-6 * estimate.value


def test_nan_is_refused() -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    operator = DenseOperator(matrix)
    operator.matrix[0, 0] = torch.nan
    refuses("not finite", hutchinson_trace, operator, num_matvecs=2)


# --------------------------------------------------- Hutch++ and XTrace: what both must do
ESTIMATORS = {"hutchpp": hutchpp_trace, "xtrace": xtrace}
# So that each has at least 30 independent (or exchangeable) samples.
NUM_MATVECS = {"hutchpp": 96, "xtrace": 64}
QUANTILE = {"hutchpp": 2.04, "xtrace": 2.04}  # t, 31 degrees of freedom


@pytest.mark.parametrize(
    ("name", "spectrum"),
    [("hutchpp", "nearly flat"), ("hutchpp", "indefinite"), ("xtrace", "decaying"), ("xtrace", "repeated")],
)
def test_intervals_cover_the_trace_of_what_deflation_leaves(build_matrix, name: str, spectrum: str) -> None:
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
    refuses("num_matvecs must be at least", ESTIMATORS[name], DenseOperator(torch.eye(5)), num_matvecs=3)


# ----------------------------------------------------------------------------------------
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


def test_variance_of_the_diagonal_is_the_known_one(build_matrix) -> None:
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


def test_a_diagonal_matrix_is_exact_one_probe_has_no_error() -> None:
    operator = DenseOperator(torch.diag(torch.arange(5.0)))
    found = hutchinson_diagonal(operator, num_matvecs=2)
    assert found.values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.stderr.tolist() == [0.0] * 5
    assert bool(hutchinson_diagonal(operator, num_matvecs=1).stderr.isnan().all())
    assert "no error: a single probe" in repr(hutchinson_diagonal(operator, num_matvecs=1))


# ----------------------------------- How many vectors fit, and that a sketch holds no more
class Diagonal(LinearOperator):
    """A product holds nothing but what it returns."""

    def __init__(self, size: int) -> None:
        super().__init__(size, dtype=torch.float64, device="cpu")
        self.values = torch.arange(1, size + 1, dtype=torch.float64).rsqrt()

    def matmat(self, vectors: Tensor) -> Tensor:
        return vectors * self.values[:, None]


def test_peak_is_the_budgets_and_a_products_own_and_not_the_rows() -> None:
    size, bytes_of_a_vector = 20_000, 8 * 20_000
    with Memory() as memory:
        sketch_eigenvalues(
            Diagonal(size), sketch_size=20, chunk_size=20, memory_budget=12.0 * bytes_of_a_vector, generator=0
        )
    taken = memory.peak / bytes_of_a_vector
    # Copies that a product and inner products make come on top. All 20 rows at once take 100.
    assert 3 < taken < 16, f"12 vectors were given, {taken:.1f} were taken"


def test_number_that_fits() -> None:
    operator = DenseOperator(torch.eye(10))
    assert vectors_that_fit(operator, 400.0) == 10
    assert vectors_that_fit(0.5 * operator + 0.1 * identity, 439.0) == 10
    assert vectors_that_fit(operator, 39.0) == 0
    assert vectors_that_fit(operator, float("inf")) > 1e12
    assert vectors_that_fit(operator, None) > 1000
    refuses("memory_budget is in bytes, at least 1, got 0: 2e9 for 2 GB", vectors_that_fit, operator, 0)


def test_ranks_take_the_least_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoRanks:
        size = 2

        def gather(self, value: int) -> list[int]:
            return [value, 7]

    operator = DenseOperator(torch.eye(10))
    monkeypatch.setattr(operator, "ranks", TwoRanks(), raising=False)
    assert vectors_that_fit(2.0 * operator, 4000.0) == 7
    assert vectors_that_fit(operator, 40.0) == 1


# ----------------------------------------------------------------------------------------
def test_from_samples_is_mean_and_standard_error() -> None:
    estimate = Estimate.from_samples(torch.tensor([1.0, 2.0, 3.0, 6.0]), num_matvecs=8)
    assert estimate.value == 3.0
    assert estimate.stderr == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert estimate.num_matvecs == 8


def test_one_sample_has_no_standard_error() -> None:
    estimate = Estimate.from_samples(torch.tensor([1.5]), num_matvecs=1)
    assert estimate.value == 1.5
    assert math.isnan(estimate.stderr)
