"""Similarities against dense gradients and the dense inverse, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import cosines, similarities
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Lissa

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(20, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (20,), generator=generator)
    return model, (x, y), (x[:5], y[:5])


def dense_gradients(model: nn.Module, points: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*points, strict=True):
        grads = torch.autograd.grad(LOSS(model(x[None]), y[None]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("solver", "columns"),
    [
        (ConjugateGradient(rtol=1e-10), None),
        (BlockConjugateGradient(rtol=1e-10), None),
        (BlockConjugateGradient(rtol=1e-10), 2),
    ],
)
def test_similarities_are_the_formulas_of_the_paper(problem, solver, columns) -> None:
    model, train, points = problem
    op = GaussNewtonOperator(model, LOSS, train)
    inverse = torch.linalg.inv(op.to_dense() + 0.01 * torch.eye(op.shape[0], dtype=torch.float64))
    gradients = dense_gradients(model, points)
    result = similarities(model, LOSS, points, op + 0.01 * identity, solver=solver, columns=columns)
    for i in range(5):
        for j in range(5):
            g, h = gradients[i], gradients[j]
            expected = g @ inverse @ h / math.sqrt((g @ inverse @ g) * (h @ inverse @ h))
            assert float(result.influence[i, j]) == pytest.approx(float(expected), abs=1e-8)
            assert float(result.gradient[i, j]) == pytest.approx(float(g @ h / (g.norm() * h.norm())), abs=1e-12)
            assert float(result.influences[i, j]) == pytest.approx(float(g @ inverse @ h), rel=1e-6)
    assert result.asymmetry < 1e-8
    assert result.converged
    assert result.residual.shape == (5,)
    assert result.num_matvecs > 0


def test_an_unfinished_solution_shows_in_what_is_reported(problem) -> None:
    model, train, points = problem
    op = GaussNewtonOperator(model, LOSS, train) + 1e-4 * identity
    result = similarities(model, LOSS, points, op, solver=ConjugateGradient(rtol=1e-6, max_steps=2))
    assert not result.converged
    assert float(result.residual.max()) > 1e-3
    assert result.asymmetry > 1e-3
    assert_close(result.influence, result.influence.T)
    lines = str(result).splitlines()
    assert len(lines) == 3
    assert "not converged: allow more steps" in lines[2]


def test_much_damping_leaves_the_gradient_similarity(problem) -> None:
    model, train, points = problem
    op = GaussNewtonOperator(model, LOSS, train) + 1e9 * identity
    result = similarities(model, LOSS, points, op, solver=BlockConjugateGradient(rtol=1e-12))
    assert_close(result.influence, result.gradient, rtol=0, atol=1e-6)
    assert float((result.influence - torch.eye(5, dtype=torch.float64)).abs().max()) > 0.1


def test_what_is_shared_in_directions_of_large_curvature_counts_less() -> None:
    """Two gradients e_0 + e_1 and e_0 + e_2, curvature 100 along e_0 and 1 elsewhere: closed form."""
    model = nn.Linear(3, 1, bias=False).double()
    points = torch.tensor([[1.0, 1, 0], [1, 0, 1]], dtype=torch.float64), -torch.ones(2, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)  # gradients 2 (h - y) x = 2 x
    op = DenseOperator(torch.diag(torch.tensor([100.0, 1, 1], dtype=torch.float64)), is_psd=True) + 1.0 * identity
    result = similarities(model, nn.MSELoss(), points, op, solver=BlockConjugateGradient(rtol=1e-12))
    assert float(result.gradient[0, 1]) == pytest.approx(1 / 2, abs=1e-12)
    assert float(result.influence[0, 1]) == pytest.approx((1 / 101) / (1 / 101 + 1 / 2), abs=1e-9)


def test_scale_of_a_loss_drops_out() -> None:
    products = torch.tensor([[4.0, 1.0], [1.0, 9.0]], dtype=torch.float64)
    scale = torch.diag(torch.tensor([3.0, 0.1], dtype=torch.float64))
    assert_close(cosines(scale @ products @ scale), cosines(products))
    assert float(cosines(products)[0, 1]) == pytest.approx(1 / 6)


def test_bad_input_is_refused(problem) -> None:
    with pytest.raises(ValueError, match="all pairwise inner products"):
        cosines(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"examples \[1\] have no positive product with themselves"):
        cosines(torch.diag(torch.tensor([1.0, 0.0, 1.0])))
    model, train, points = problem
    diverging = Lissa(step_size=10.0, batch_size=1, num_steps=2, raise_on_divergence=False)
    op = GaussNewtonOperator(model, LOSS, train) + 1.0 * identity
    with pytest.raises(ValueError, match="no positive product with themselves"):
        similarities(model, LOSS, points, op, solver=diverging, generator=torch.Generator().manual_seed(0))
