from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import HessianOperator
from curvlab.linalg import LinearOperator
from curvlab.optim import UniformDirection


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


def test_rule_for_alpha_with_given_constants(make_quadratic, generator) -> None:
    problem = make_quadratic([1.0, 0.5, 0.1])
    norm = float((problem.matrix @ problem.x.detach() - problem.linear).norm())
    optimizer = UniformDirection(
        problem.parameters(), problem.operator, sigma=0.25, hessian_lipschitz=2.0, generator=generator
    )
    optimizer.step(problem.closure)
    assert optimizer.last_step.alpha == pytest.approx(math.sqrt(norm) + 0.25)
    assert optimizer.last_step.num_matvecs == 1


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


def test_one_dimension_without_shift_is_newtons_method(make_quadratic, generator) -> None:
    problem = make_quadratic([3.0])
    optimizer = UniformDirection(problem.parameters(), problem.operator, alpha=0.0, generator=generator)
    optimizer.step(problem.closure)
    assert float(problem.x) == pytest.approx(float(problem.linear) / 3, rel=1e-14)


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


def test_many_directions_approach_newtons_method(make_quadratic, generator) -> None:
    problem = make_quadratic([2.0, 1.0, 0.5])
    optimum = torch.linalg.solve(problem.matrix, problem.linear)
    optimizer = UniformDirection(
        problem.parameters(), problem.operator, alpha=0.0, num_directions=200_000, generator=generator
    )
    before = float((problem.x - optimum).norm())
    optimizer.step(problem.closure)
    assert float((problem.x - optimum).norm()) < 0.03 * before


def test_no_dense_matrix_is_formed(generator) -> None:
    size = 300_000  # 720 GB as a matrix
    scale = torch.linspace(1, 2, size)

    class Diagonal(LinearOperator):
        def matmat(self, vectors: Tensor) -> Tensor:
            return scale[:, None] * vectors

    x = nn.Parameter(torch.ones(size))
    optimizer = UniformDirection([x], Diagonal(size, dtype=torch.float32, device="cpu"), alpha=1.0)
    x.grad = scale.clone()
    optimizer.step()
    assert optimizer.last_step.slope < 0


def test_network_with_a_hessian_operator(generator) -> None:
    inputs = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    targets = (inputs[:, :1] > 0).double()
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    loss = nn.BCEWithLogitsLoss()
    operator = HessianOperator(network, loss, (inputs, targets))
    optimizer = UniformDirection(network.parameters(), operator, num_directions=2, generator=generator)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(network(inputs), targets)
        value.backward()
        return value

    first = float(optimizer.step(closure))
    for _ in range(12):
        last = float(optimizer.step(closure))
    assert last < first
    assert optimizer.last_step.hessian_lipschitz > 0


def test_hessian_of_the_batch_can_be_passed(make_quadratic, generator) -> None:
    problem = make_quadratic([1.0, 2.0])
    optimizer = UniformDirection(problem.parameters(), problem.operator, alpha=1.0, generator=generator)
    problem.closure()
    optimizer.step(hessian=-1.0 * problem.operator)
    assert optimizer.last_step.smallest_eigenvalue < -0.5
