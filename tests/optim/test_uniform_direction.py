"""Steps by uniform directions, the estimate of the Hessian behind them, its error, and bounds on their number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.linalg import DenseOperator, LinearOperator
from curvlab.optim import (
    LowRankMatrix,
    UniformDirection,
    direction_estimate,
    expected_squared_error,
    printed_steps_bound,
    stated_sigma,
    stated_squared_error,
    steps_bound,
    unit_directions,
)
from tests.matrices import with_spectrum
from tests.refusals import refuses


def spherical_design(size: int) -> Tensor:
    """Unit vectors, (n, count), whose averages equal those over the sphere for polynomials of degree 4.

    Pair, hexagon, icosahedron, 24-cell (Delsarte, Goethals & Seidel 1977).
    """
    if size == 1:
        points = [[1.0], [-1.0]]
    elif size == 2:
        points = [[math.cos(k * math.pi / 3), math.sin(k * math.pi / 3)] for k in range(6)]
    elif size == 3:
        golden = (1 + math.sqrt(5)) / 2
        signs = [(s, t * golden) for s in (1, -1) for t in (1, -1)]
        points = [p for a, b in signs for p in ([0, a, b], [a, b, 0], [b, 0, a])]
    elif size == 4:
        points = []
        for i in range(4):
            for j in range(i):
                for s in (1, -1):
                    for t in (1, -1):
                        point = [0.0] * 4
                        point[i], point[j] = s, t
                        points.append(point)
    else:
        raise ValueError(size)
    directions = torch.tensor(points, dtype=torch.float64).T
    return directions / directions.norm(dim=0)


def drawn_directions(seed: int, size: int, count: int) -> Tensor:
    """The directions that a fresh generator gives: columns of Gaussians on the unit sphere."""
    gaussians = torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).T
    return gaussians / gaussians.norm(dim=0)


@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("num_directions", [1, 3, 8])
@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_step_agrees_with_a_dense_solve(make_quadratic, symmetrize, num_directions, delta) -> None:
    problem = make_quadratic([5.0, 2.0, 1.0, 0.5, 0.1])
    matrix, start = problem.matrix, problem.x.detach().clone()
    gradient = matrix @ start - problem.linear
    directions = drawn_directions(7, 5, num_directions)
    dense = torch.zeros(5, 5, dtype=torch.float64)
    for u in directions.T:
        dense += 5 * matrix @ torch.outer(u, u) / num_directions
    if symmetrize:
        dense = (dense + dense.T) / 2
    expected = start - torch.linalg.solve(dense + (delta + 2.0) * torch.eye(5, dtype=torch.float64), gradient)
    optimizer = UniformDirection(
        problem.parameters(),
        problem.operator,
        delta=delta,
        num_directions=num_directions,
        symmetrize=symmetrize,
        alpha=2.0,
        safeguard=False,
        generator=torch.Generator().manual_seed(7),
    )
    loss = optimizer.step(problem.closure)
    torch.testing.assert_close(problem.x.detach(), expected, rtol=1e-10, atol=1e-10)
    assert float(loss) == pytest.approx(float(0.5 * start @ matrix @ start - problem.linear @ start))
    info = optimizer.last_step
    assert info.smallest_eigenvalue == pytest.approx(
        min(float(torch.linalg.eigvalsh((dense + dense.T) / 2)[0]), math.inf), abs=1e-10
    )
    assert info.slope == pytest.approx(float(gradient @ (expected - start)), rel=1e-8)
    assert info.num_matvecs == num_directions


def test_sigma_is_estimated_from_the_spectral_norm_of_an_indefinite_hessian(make_quadratic, generator) -> None:
    problem = make_quadratic([1.0, 0.5, -4.0])
    optimizer = UniformDirection(
        problem.parameters(), problem.operator, hessian_lipschitz=0.0, delta=0.1, generator=generator
    )
    optimizer.step(problem.closure)
    assert optimizer.last_step.spectral_norm == pytest.approx(4.0, rel=1e-6)
    assert optimizer.last_step.sigma == pytest.approx(math.sqrt(16 * 6 + 3 * 0.01), rel=1e-6)


def test_hessian_lipschitz_is_exact_on_a_cubic(generator) -> None:
    x = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))  # f = x³, f''' = 6

    class Second(LinearOperator):
        def matmat(self, vectors: Tensor) -> Tensor:
            return 6 * x.detach() * vectors

    operator = Second(1, dtype=torch.float64, device="cpu")
    optimizer = UniformDirection([x], operator, sigma=0.0, generator=generator)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (x**3).sum()
        value.backward()
        return value

    optimizer.step(closure)
    assert optimizer.last_step.hessian_lipschitz == 0.0  # nothing is known before the first step
    optimizer.step(closure)
    assert optimizer.last_step.hessian_lipschitz == pytest.approx(6.0)
    assert optimizer.last_step.alpha == pytest.approx(math.sqrt(6 * optimizer.last_step.gradient_norm / 2))


@pytest.mark.parametrize("symmetrize", [True, False])
def test_safeguard_keeps_steps_downhill_and_short(make_quadratic, symmetrize, generator) -> None:
    problem = make_quadratic([1.0, -1.0, -2.0, 0.3])
    start = problem.x.detach().clone()
    uphill = {True: 0, False: 0}
    for safeguard in (True, False):
        optimizer = UniformDirection(
            problem.parameters(),
            problem.operator,
            alpha=0.5,
            symmetrize=symmetrize,
            safeguard=safeguard,
            generator=generator,
        )
        for _ in range(60):
            problem.x.data.copy_(start)
            optimizer.step(problem.closure)
            info = optimizer.last_step
            uphill[safeguard] += info.slope > 0
            if safeguard:
                assert info.step_norm <= 2 * info.gradient_norm / 0.5
    assert uphill[True] == 0
    assert uphill[False] > 10


def test_safeguard_never_acts_under_the_lemma_on_a_convex_function(make_quadratic, generator) -> None:
    problem = make_quadratic([1.0, 1.0, 0.0, 0.5, 0.0])
    optimizer = UniformDirection(problem.parameters(), problem.operator, generator=generator)
    values = []
    for _ in range(100):
        values.append(float(optimizer.step(problem.closure)))
        assert not optimizer.last_step.safeguarded
    assert sorted(values, reverse=True) == values


def test_hessian_of_the_batch_can_be_passed(make_quadratic, generator) -> None:
    problem = make_quadratic([1.0, 2.0])
    optimizer = UniformDirection(problem.parameters(), problem.operator, alpha=1.0, generator=generator)
    problem.closure()
    optimizer.step(hessian=-1.0 * problem.operator)
    assert optimizer.last_step.smallest_eigenvalue < -0.5


SPECTRA = {
    "isotropic": [2.0, 2.0, 2.0, 2.0],
    "decaying": [3.0, 0.5, 0.1, 0.0],
    "indefinite": [1.0, -4.0, 0.3, -0.2],
    "equal magnitudes": [2.0, -2.0, 2.0, -2.0],
}


def hessian(name: str, size: int, generator: torch.Generator) -> Tensor:
    return with_spectrum(torch.tensor(SPECTRA[name][:size], dtype=torch.float64), generator)


def dense_estimates(matrix: Tensor, directions: Tensor, *, symmetrize: bool) -> Tensor:
    """(count, n, n), written out from the definition."""
    size = len(matrix)
    found = torch.stack([size * matrix @ torch.outer(u, u) for u in directions.T])
    return (found + found.mT) / 2 if symmetrize else found


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


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (6, 1), (6, 2), (6, 3), (4, 6), (50, 8)])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 30.0])
def test_shifted_solve_agrees_with_a_dense_one(size: int, rank: int, shift: float, generator) -> None:
    left, right = torch.randn(2, size, rank, dtype=torch.float64, generator=generator)
    b = torch.randn(size, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(left, right, torch.cat([left, right], 1))
    dense = left @ right.T
    torch.testing.assert_close(matrix.to_dense(), dense, rtol=1e-12, atol=1e-12)
    expected = torch.linalg.solve(dense + shift * torch.eye(size, dtype=torch.float64), b)
    assert float((matrix.solve_shifted(b, shift=shift) - expected).norm() / expected.norm()) < 1e-10


def test_dependent_columns_do_no_harm(generator) -> None:
    u = torch.randn(5, 1, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(u, u, torch.cat([u, 2 * u, 0 * u], 1))
    b = torch.randn(5, dtype=torch.float64, generator=generator)
    expected = torch.linalg.solve(u @ u.T + 0.1 * torch.eye(5, dtype=torch.float64), b)
    torch.testing.assert_close(matrix.solve_shifted(b, shift=0.1), expected, rtol=1e-10, atol=1e-12)


def test_a_tiny_shift_does_not_cancel() -> None:
    # 1/shift [I - A (shift I + BᵀA)⁻¹ Bᵀ] b would lose all digits here.
    one = torch.ones(1, 1, dtype=torch.float64)
    matrix = LowRankMatrix.from_factors(3 * one, one, one)
    assert float(matrix.solve_shifted(one[0], shift=1e-300)) == pytest.approx(1 / 3, rel=1e-14)


@pytest.mark.parametrize("size", [3, 6])
def test_smallest_eigenvalue_of_the_symmetric_part(size: int, generator) -> None:
    left, right = torch.randn(2, size, 2, dtype=torch.float64, generator=generator)
    matrix = LowRankMatrix.from_factors(left, right, torch.cat([left, right], 1))
    dense = left @ right.T
    expected = torch.linalg.eigvalsh((dense + dense.T) / 2)[0]
    assert matrix.smallest_eigenvalue() == pytest.approx(float(expected), rel=1e-10)


def test_zero_counts_as_an_eigenvalue_only_outside_the_span() -> None:
    u = torch.eye(3, 1, dtype=torch.float64)
    assert LowRankMatrix.from_factors(u, u, u).smallest_eigenvalue() == 0.0
    whole = torch.eye(2, dtype=torch.float64)
    assert LowRankMatrix.from_factors(5 * whole, whole, whole).smallest_eigenvalue() == pytest.approx(5.0)


def test_value_by_hand() -> None:
    # 8 · 2 (sqrt(8/2) 8 + 3 · 16) + 2 log(5 / 0.25), at ε = 1/4
    found = steps_bound(0.25, gap=2.0, gradient_norm=5.0, hessian_lipschitz=8.0, sigma=3.0)
    assert found == math.ceil(16 * (2 * 8 + 3 * 16) + 2 * math.log(20))


def test_parts_of_sigma_come_with_their_powers() -> None:
    plain = {"gap": 1.0, "gradient_norm": 1.0, "hessian_lipschitz": 0.0}
    for name, power in {"sigma": 2, "sigma_root": 1.5, "sigma_slope": 1}.items():
        for epsilon in (1e-2, 1e-4):
            found = steps_bound(epsilon, **plain, **{name: 3.0})
            assert found == pytest.approx(24 * epsilon**-power - 2 * math.log(epsilon), abs=1.01)


def test_scaling_the_function_keeps_the_bound_but_not_the_printed_one() -> None:
    settings = {"gap": 2.0, "gradient_norm": 5.0, "hessian_lipschitz": 8.0, "sigma": 3.0}
    for scale in (1e-6, 1e3):
        scaled = {name: scale * value for name, value in settings.items()}
        assert steps_bound(0.01 * scale, **scaled) == pytest.approx(steps_bound(0.01, **settings), abs=1)
    tiny = {name: 1e-6 * value for name, value in {**settings, "sigma": 0.0, "gap": 1e-9}.items()}
    assert printed_steps_bound(1e-7, **tiny) < 0
    refuses("epsilon must be positive", steps_bound, 0.0, gap=1.0, gradient_norm=1.0, hessian_lipschitz=1.0)
