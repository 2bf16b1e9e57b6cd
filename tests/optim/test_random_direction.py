from __future__ import annotations

import math

import pytest
import torch
from spherical_designs import spherical_design
from torch import Tensor

from curvlab.linalg import DenseOperator
from curvlab.optim import (
    direction_estimate,
    expected_squared_error,
    stated_sigma,
    stated_squared_error,
    unit_directions,
)

SPECTRA = {
    "isotropic": [2.0, 2.0, 2.0, 2.0],
    "decaying": [3.0, 0.5, 0.1, 0.0],
    "indefinite": [1.0, -4.0, 0.3, -0.2],
    "equal magnitudes": [2.0, -2.0, 2.0, -2.0],
}


def hessian(name: str, size: int, generator: torch.Generator) -> Tensor:
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    return basis @ torch.diag(torch.tensor(SPECTRA[name][:size], dtype=torch.float64)) @ basis.T


def dense_estimates(matrix: Tensor, directions: Tensor, *, symmetrize: bool) -> Tensor:
    """(count, n, n), written out from the definition."""
    size = len(matrix)
    found = torch.stack([size * matrix @ torch.outer(u, u) for u in directions.T])
    return (found + found.mT) / 2 if symmetrize else found


@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("num_directions", [1, 2, 5])
def test_estimate_is_the_definition(symmetrize: bool, num_directions: int, generator) -> None:
    matrix = hessian("indefinite", 4, generator)
    directions = unit_directions(DenseOperator(matrix), num_directions, generator=generator)
    torch.testing.assert_close(directions.norm(dim=0), torch.ones(num_directions, dtype=torch.float64))
    found = direction_estimate(DenseOperator(matrix), directions, symmetrize=symmetrize).to_dense()
    expected = dense_estimates(matrix, directions, symmetrize=symmetrize).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECTRA)
def test_mean_is_the_hessian_by_enumeration(name: str, size: int, symmetrize: bool, generator) -> None:
    matrix = hessian(name, size, generator)
    design = spherical_design(size)
    found = direction_estimate(DenseOperator(matrix), design, symmetrize=symmetrize).to_dense()
    torch.testing.assert_close(found, matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delta", [0.0, 0.7])
@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECTRA)
def test_expected_error_by_enumeration(name: str, size: int, symmetrize: bool, delta: float, generator) -> None:
    matrix = hessian(name, size, generator)
    estimates = dense_estimates(matrix, spherical_design(size), symmetrize=symmetrize)
    errors = estimates + delta * torch.eye(size, dtype=torch.float64) - matrix
    expected = float(errors.square().sum((1, 2)).mean())
    found = expected_squared_error(
        size,
        squared_norm=float(matrix.square().sum()),
        trace=float(matrix.trace()),
        delta=delta,
        symmetrize=symmetrize,
    )
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)
    stated = stated_squared_error(size, spectral_norm=float(torch.linalg.matrix_norm(matrix, 2)), delta=delta)
    assert found <= stated * (1 + 1e-12) + 1e-12
    equality = name == "isotropic" or (name == "equal magnitudes" and not symmetrize)
    assert (found == pytest.approx(stated, rel=1e-10)) is (equality or size == 1)


@pytest.mark.parametrize("delta", [0.0, 0.7])
@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("name", ["decaying", "indefinite"])
def test_expected_error_in_ten_dimensions_by_monte_carlo(
    name: str, symmetrize: bool, delta: float, generator
) -> None:
    k = torch.arange(1, 11, dtype=torch.float64)
    eigenvalues = 1 / k if name == "decaying" else (-1) ** k * k / 5
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=generator)).Q
    matrix = basis @ torch.diag(eigenvalues) @ basis.T
    gaussians = torch.randn(10, 5000, dtype=torch.float64, generator=generator)
    estimates = dense_estimates(matrix, gaussians / gaussians.norm(dim=0), symmetrize=symmetrize)
    squares = (estimates + delta * torch.eye(10, dtype=torch.float64) - matrix).square().sum((1, 2))
    exact = expected_squared_error(
        10,
        squared_norm=float(eigenvalues.square().sum()),
        trace=float(eigenvalues.sum()),
        delta=delta,
        symmetrize=symmetrize,
    )
    assert abs(float(squares.mean()) - exact) < 3 * float(squares.std()) / math.sqrt(len(squares))
    assert exact < stated_squared_error(10, spectral_norm=float(eigenvalues.abs().max()), delta=delta)


def test_expected_error_of_a_mean_by_monte_carlo(generator) -> None:
    matrix = hessian("decaying", 4, generator)
    operator = DenseOperator(matrix)
    squares = []
    for _ in range(1500):
        directions = unit_directions(operator, 3, generator=generator)
        error = direction_estimate(operator, directions).to_dense() - matrix
        squares.append(error.square().sum())
    sample = torch.stack(squares)
    exact = expected_squared_error(
        4, squared_norm=float(matrix.square().sum()), trace=float(matrix.trace()), num_directions=3
    )
    assert abs(float(sample.mean()) - exact) < 3 * float(sample.std()) / math.sqrt(len(sample))


def test_the_largest_eigenvalue_alone_does_not_bound_an_indefinite_hessian() -> None:
    error = expected_squared_error(2, squared_norm=101.0, trace=-9.0, symmetrize=False)  # eigenvalues 1, -10
    assert error > stated_squared_error(2, spectral_norm=1.0)
    assert error <= stated_squared_error(2, spectral_norm=10.0)


def test_psd_hessians_bound_every_draw(generator) -> None:
    # What the docstring of UniformDirection rests on: smallest eigenvalue at least -λn/8, ‖S - H‖ <= λ(n - 1).
    for size in (2, 3, 10):
        eigenvalues = torch.rand(size, dtype=torch.float64, generator=generator).round()
        eigenvalues[0] = 1.0
        operator = DenseOperator(torch.diag(eigenvalues))
        for _ in range(200):
            estimate = direction_estimate(operator, unit_directions(operator, 1, generator=generator))
            assert estimate.smallest_eigenvalue() >= -size / 8 - 1e-12
            assert torch.linalg.matrix_norm(estimate.to_dense() - operator.matrix, 2) <= size - 1 + 1e-12


def test_stated_sigma_is_the_root_for_several_directions() -> None:
    assert stated_sigma(10, spectral_norm=2.0, delta=0.5) == pytest.approx(math.sqrt(4 * 90 + 10 * 0.25))
    assert stated_sigma(10, spectral_norm=2.0, num_directions=9) == pytest.approx(math.sqrt(40))
