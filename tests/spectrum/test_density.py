import math

import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator
from curvlab.spectrum import spectral_density


def smoothed(eigenvalues: Tensor, grid: Tensor, width: float) -> Tensor:
    normal = torch.distributions.Normal(eigenvalues, width)
    return normal.log_prob(grid[:, None]).exp().mean(1)


def test_covers_the_exact_smoothed_density(matrix: Tensor) -> None:
    eigenvalues = torch.linalg.eigvalsh(matrix)
    result = spectral_density(
        DenseOperator(matrix),
        num_probes=40,
        num_steps=40,
        width=0.15,
        generator=torch.Generator().manual_seed(0),
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


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="need num_probes"):
        spectral_density(DenseOperator(torch.eye(5)), num_probes=0)
    with pytest.raises(ValueError, match="width must be positive"):
        spectral_density(DenseOperator(torch.eye(5)), width=0.0)
