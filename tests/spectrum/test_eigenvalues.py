"""Eigenvalues by Lanczos, the spectral density, the Frobenius norm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from curvlab.iterate import Checkpoint
from curvlab.linalg import DenseOperator, orthonormalise
from curvlab.spectrum import Eigenvalues, frobenius_norm, spectral_density, top_eigenvalues
from tests.matrices import with_spectrum
from tests.refusals import refuses, stopped


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_exact_when_run_to_the_end(matrix: Tensor, k: int, seed: int) -> None:
    result = top_eigenvalues(DenseOperator(matrix), k, rtol=1e-11, max_matvecs=1000, generator=seeded(seed))
    truth = torch.linalg.eigvalsh(matrix).flip(0)[:k]  # the repeated top eigenvalue counts three times
    torch.testing.assert_close(result.values, truth, rtol=1e-10, atol=1e-12)
    assert result.converged
    gram = result.vectors.T @ result.vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_half_precision_finds_the_same_to_its_rounding(matrix: Tensor, dtype: torch.dtype, seed: int) -> None:
    operator, truth = DenseOperator(matrix.to(dtype)), torch.linalg.eigvalsh(matrix.to(dtype).double())
    rounding = 4 * torch.finfo(dtype).eps * float(truth.abs().max())
    found = top_eigenvalues(operator, 2, generator=seeded(seed))
    torch.testing.assert_close(found.values, truth.flip(0)[:2], rtol=0, atol=rounding)
    nodes = spectral_density(operator, num_steps=len(truth), num_probes=2, generator=seeded(seed)).nodes
    torch.testing.assert_close(nodes.max(), truth.max(), rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("k", "num_matvecs", "dtype"),
    [(1, 4, torch.float64), (2, 8, torch.float32), (1, 16, torch.float32), (2, 40, torch.float64)],
)
def test_bound_holds_at_every_stage(matrix: Tensor, k: int, num_matvecs: int, dtype: torch.dtype) -> None:
    operator = DenseOperator(matrix.to(dtype))
    spectrum = torch.linalg.eigvalsh(operator.matrix.double())
    for seed in range(5):
        result = top_eigenvalues(operator, k, rtol=1e-9, max_matvecs=num_matvecs, generator=seeded(seed))
        assert result.num_matvecs <= num_matvecs
        distance = (result.values[:, None] - spectrum).abs().min(dim=1).values
        assert bool((distance <= result.error_bounds).all())
        vectors = result.vectors.double()
        residual = (operator.matrix.double() @ vectors - vectors * result.values).norm(dim=0)
        assert bool((residual <= 2 * result.error_bounds).all())  # the bound is this residual
        assert bool((result.error_bounds <= residual + 1e-5 * spectrum.abs().max()).all())  # and not more


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_sizes_that_blocks_do_not_divide(k: int) -> None:
    values = torch.tensor([3.0, 3.0, 2.0, 1.0, 1.0, 0.5, -4.0], dtype=torch.float64)
    generator = seeded(5)
    operator = DenseOperator(with_spectrum(values, generator))
    result = top_eigenvalues(operator, k, rtol=1e-12, max_matvecs=100, generator=generator)
    torch.testing.assert_close(result.values, values[:k], rtol=1e-11, atol=1e-12)
    assert result.num_matvecs <= 7


def test_stops_when_converged_and_reports_the_cost(build_matrix) -> None:
    matrix = build_matrix("exponential", 200)
    result = top_eigenvalues(DenseOperator(matrix), rtol=1e-3, generator=seeded())
    assert result.converged
    assert result.num_matvecs < 20
    assert float(result.values[0]) == pytest.approx(1.0, rel=1e-3)
    assert bool(result.error_bounds[0] <= 1e-3)


def test_too_few_products_is_not_converged(build_matrix) -> None:
    result = top_eigenvalues(DenseOperator(build_matrix("indefinite", 60)), max_matvecs=3, generator=seeded())
    assert not result.converged
    assert result.num_matvecs == 3


def test_negated_operator_gives_the_smallest(build_matrix) -> None:
    result = top_eigenvalues(-DenseOperator(build_matrix("indefinite", 60)), rtol=1e-6, generator=seeded())
    assert float(result.values[0]) == pytest.approx(3.0, rel=1e-6)


def test_zero_operator() -> None:
    result = top_eigenvalues(DenseOperator(torch.zeros(5, 5)), 2, generator=seeded())
    assert result.values.tolist() == [0.0, 0.0]
    assert result.converged


@pytest.mark.parametrize(
    ("k", "max_matvecs", "message"),
    [(0, 10, "between 1 and"), (4, 10, "between 1 and"), (2, 1, "max_matvecs must be at least 2")],
)
def test_bad_settings(k: int, max_matvecs: int, message: str) -> None:
    refuses(message, top_eigenvalues, DenseOperator(torch.eye(3)), k, max_matvecs=max_matvecs)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("num_vectors", [0, 12, 20, 40])
def test_restarted_basis_finds_what_dense_eigenvalues_are(build_matrix, k: int, num_vectors: int) -> None:
    """A budget for 3 k to 22 columns, that the basis outgrows: the same limit, with bounds that hold."""
    matrix = build_matrix("exponential", 200).double()
    truth = torch.linalg.eigvalsh(matrix).flip(0)[:k]
    budget = max(1, num_vectors) * 200 * 8
    result = top_eigenvalues(
        DenseOperator(matrix), k, rtol=1e-6, max_matvecs=3000, memory_budget=budget, generator=seeded()
    )
    assert result.converged
    assert bool(((result.values - truth).abs() <= result.error_bounds + 1e-12).all())
    torch.testing.assert_close(result.values, truth, rtol=1e-6, atol=0)
    residual = (matrix @ result.vectors - result.vectors * result.values).norm(dim=0)
    assert bool((residual <= 2 * result.error_bounds + 1e-12).all())
    gram = result.vectors.T @ result.vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-10)


def test_smaller_basis_costs_products_and_a_basis_that_fits_changes_nothing(build_matrix) -> None:
    operator = DenseOperator(build_matrix("exponential", 300))

    def found(num_vectors: int) -> Eigenvalues:
        budget = num_vectors * 300 * operator.dtype.itemsize
        return top_eigenvalues(operator, 2, rtol=1e-5, memory_budget=budget, generator=seeded())

    free, roomy, narrow = top_eigenvalues(operator, 2, rtol=1e-5, generator=seeded()), found(1000), found(18)
    assert torch.equal(free.values, roomy.values)
    assert torch.equal(free.vectors, roomy.vectors)
    assert narrow.num_matvecs > free.num_matvecs
    torch.testing.assert_close(narrow.values, free.values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("killed_at", [3, 9, 14, 25])  # the basis of 12 vectors is full, and cut down, in between
def test_restarted_basis_goes_on_from_a_checkpoint(build_matrix, tmp_path: Path, killed_at: int) -> None:
    operator = DenseOperator(build_matrix("indefinite", 300))
    settings = {"rtol": 1e-6, "max_matvecs": 3000, "memory_budget": 18 * 300 * operator.dtype.itemsize}
    steps: list[int] = []

    whole = top_eigenvalues(operator, generator=seeded(), **settings)
    assert whole.converged
    assert whole.num_matvecs > 30
    settings["checkpoint"] = Checkpoint(tmp_path / "basis", every=1)
    stopped(killed_at, top_eigenvalues, operator, generator=seeded(), **settings)
    rest = top_eigenvalues(
        operator, callback=lambda state: steps.append(state.num_steps), generator=seeded(), **settings
    )
    assert steps[0] == killed_at  # the step that was not saved
    assert torch.equal(rest.values, whole.values)
    assert torch.equal(rest.vectors, whole.vectors)
    assert rest.num_matvecs == whole.num_matvecs


# ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 5, 32, 33, 80])
@pytest.mark.parametrize("num_fixed", [0, 10])
def test_factorisation(width: int, num_fixed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(120, dtype=torch.float64))
    fixed, _ = torch.linalg.qr(torch.randn(120, num_fixed, generator=generator, dtype=torch.float64))
    candidates = torch.randn(120, width, generator=generator, dtype=torch.float64)
    basis, factor = orthonormalise(operator, candidates, against=fixed)
    both = torch.cat([fixed, basis], dim=1)
    torch.testing.assert_close(
        both.T @ both, torch.eye(num_fixed + width, dtype=torch.float64), atol=1e-13, rtol=0
    )
    rest = candidates - fixed @ (fixed.T @ candidates)
    torch.testing.assert_close(basis @ factor, rest, atol=1e-12, rtol=0)
    assert bool((factor.tril(-1) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_although_columns_nearly_depend_on_one_another(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(200, dtype=dtype))
    decay = torch.logspace(0, -18, 60, dtype=torch.float64)
    left, _ = torch.linalg.qr(torch.randn(200, 60, generator=generator, dtype=torch.float64))
    candidates = ((left * decay) @ torch.randn(60, 60, generator=generator, dtype=torch.float64)).to(dtype)
    basis, factor = orthonormalise(operator, candidates)
    rounding = torch.finfo(dtype).eps
    gram = basis.T @ basis
    assert float((gram - torch.eye(basis.shape[1], dtype=dtype)).abs().max()) < 50 * rounding
    assert float((basis.double() @ factor - candidates.double()).norm()) < 2000 * rounding * float(
        candidates.norm()
    )
    assert 15 < basis.shape[1] < 60  # what is only rounding was dropped


def test_vanished_columns_are_dropped_or_filled() -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(6, dtype=torch.float64))
    one = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    candidates = torch.cat([one, 2 * one, -one], dim=1)
    basis, factor = orthonormalise(operator, candidates)
    assert basis.shape == (6, 1)
    torch.testing.assert_close(basis @ factor, candidates)
    filled, factor = orthonormalise(operator, candidates, fill=True, generator=generator)
    torch.testing.assert_close(filled.T @ filled, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(filled @ factor, candidates)
    rest, _ = orthonormalise(operator, torch.ones(6, 9, dtype=torch.float64), against=filled, fill=True)
    assert rest.shape == (6, 3)  # no more room


# ----------------------------------------------------------------------------------------
def smoothed(eigenvalues: Tensor, grid: Tensor, width: float) -> Tensor:
    normal = torch.distributions.Normal(eigenvalues, width)
    return normal.log_prob(grid[:, None]).exp().mean(1)


@pytest.mark.parametrize("matrix", ["decaying", "repeated", "indefinite"], indirect=True)
def test_covers_the_exact_smoothed_density(matrix: Tensor) -> None:
    eigenvalues = torch.linalg.eigvalsh(matrix)
    result = spectral_density(
        DenseOperator(matrix), num_probes=40, num_steps=40, width=0.15, generator=torch.Generator().manual_seed(0)
    )
    truth = smoothed(eigenvalues, result.grid, 0.15)
    inside = (result.density - truth).abs() <= 2.02 * result.stderr + 1e-3 * truth.max()
    assert float(inside.double().mean()) > 0.9
    assert float(torch.trapezoid(result.density, result.grid)) == pytest.approx(1.0, abs=1e-3)
    assert result.num_matvecs == 40 * 40


def test_full_lanczos_with_many_probes_integrates_functions(build_matrix) -> None:
    matrix = build_matrix("decaying", 30)
    result = spectral_density(
        DenseOperator(matrix), num_probes=50, num_steps=30, generator=torch.Generator().manual_seed(0)
    )
    eigenvalues = torch.linalg.eigvalsh(matrix)
    for function in (torch.ones_like, torch.square, lambda x: torch.log(x.clamp(min=0) + 0.1)):
        samples = (function(result.nodes) * result.weights).sum(1)
        truth = float(function(eigenvalues).mean())
        assert abs(float(samples.mean()) - truth) <= 4 * float(samples.std()) / math.sqrt(50) + 1e-10


def test_one_probe_has_no_standard_error() -> None:
    result = spectral_density(DenseOperator(torch.eye(5, dtype=torch.float64)), num_probes=1, num_steps=3)
    assert bool(result.stderr.isnan().all())
    assert float(result.grid[result.density.argmax()]) == pytest.approx(1.0, abs=0.01)


# ----------------------------------------------------------------------------------------
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


def test_two_batches_are_unbiased_where_one_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(100, 15, generator=generator, dtype=torch.float64)
    factors = factors * torch.arange(1, 16, dtype=torch.float64) ** -0.75
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
    with pytest.raises(ValueError, match="num_matvecs must be at least 2"):
        frobenius_norm(DenseOperator(torch.ones(2, 3, 3)), num_matvecs=1, batch_size=4)
