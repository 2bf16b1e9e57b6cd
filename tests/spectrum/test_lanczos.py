from pathlib import Path

import pytest
import torch
from torch import Tensor

from curvlab.iterate import Checkpoint
from curvlab.linalg import DenseOperator
from curvlab.spectrum import Eigenvalues, top_eigenvalues
from curvlab.spectrum.eigenvalues import EigenvaluesState


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("num_matvecs", [4, 8, 16, 40])
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
    basis, _ = torch.linalg.qr(torch.randn(7, 7, generator=generator, dtype=torch.float64))
    matrix = basis * values @ basis.T
    operator = DenseOperator((matrix + matrix.T) / 2)
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
    [(0, 10, "between 1 and"), (4, 10, "between 1 and"), (2, 1, "at least k")],
)
def test_bad_settings(k: int, max_matvecs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_eigenvalues(DenseOperator(torch.eye(3)), k, max_matvecs=max_matvecs)


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

    def kill(state: EigenvaluesState) -> None:
        if state.num_steps == killed_at:
            raise KeyboardInterrupt

    whole = top_eigenvalues(operator, generator=seeded(), **settings)
    assert whole.converged
    assert whole.num_matvecs > 30
    settings["checkpoint"] = Checkpoint(tmp_path / "basis", every=1)
    with pytest.raises(KeyboardInterrupt):
        top_eigenvalues(operator, callback=kill, generator=seeded(), **settings)
    rest = top_eigenvalues(
        operator, callback=lambda state: steps.append(state.num_steps), generator=seeded(), **settings
    )
    assert steps[0] == killed_at  # the step that was not saved
    assert torch.equal(rest.values, whole.values)
    assert torch.equal(rest.vectors, whole.vectors)
    assert rest.num_matvecs == whole.num_matvecs
