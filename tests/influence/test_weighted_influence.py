"""Influence where the training loss weighs its examples: ridge regression, known for any weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import influence, influence_scores
from curvlab.solvers import Direct

DAMPING = 0.1
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)


def ridge(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the minimum of 1/N Σ w_i (y_i - θᵀx_i)² + DAMPING/2 |θ|² by its normal equations, (F,)."""
    matrix = 2 / len(x) * x.T @ (weights[:, None] * x) + DAMPING * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(matrix, 2 / len(x) * x.T @ (weights * y))


@pytest.fixture
def data(generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def draw(count: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(count, k, generator=generator, dtype=torch.float64) for k in (4, 1))  # type: ignore[return-value]

    return draw(12), draw(5)


@pytest.mark.parametrize("solver", [Direct(), None], ids=["direct", "default"])
@pytest.mark.parametrize("num_points", [3, 12], ids=["solved for points", "solved for test"])
def test_scores_are_the_derivative_of_refitted_weighted_ridge_regression(data, solver, num_points) -> None:
    (x, y), test = data
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(x, y[:, 0], WEIGHTS)[None])
    found = influence(
        model,
        nn.MSELoss(),
        (x, y),
        test,
        points=range(num_points),
        damping=DAMPING,
        solver=solver,
        rtol=None if solver else 1e-10,
        weights=WEIGHTS,
    )

    def test_losses(weights: Tensor) -> Tensor:
        return (test[1][:, 0] - test[0] @ ridge(x, y[:, 0], weights)).square()

    step = 1e-5
    for point in range(num_points):
        change = torch.zeros(12, dtype=torch.float64)
        change[point] = 12 * step  # a weight of `step` on l(z) itself, beside the mean over 12
        slope = (test_losses(WEIGHTS + change) - test_losses(WEIGHTS - change)) / (2 * step)
        torch.testing.assert_close(found.scores[:, point], slope, rtol=1e-6, atol=1e-8)


def test_weights_of_one_change_nothing_and_others_do(data) -> None:
    train, test = data
    model = nn.Linear(4, 1, bias=False).double()
    settings = {"damping": DAMPING, "solver": Direct()}
    plain = influence_scores(model, nn.MSELoss(), train, test, **settings)
    ones = influence_scores(model, nn.MSELoss(), train, test, weights=torch.ones(12), **settings)
    torch.testing.assert_close(ones, plain)
    twice = influence_scores(model, nn.MSELoss(), train, test, weights=WEIGHTS, **settings)
    assert float((twice - plain).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (torch.ones(11), "one weight for each of 12 examples, got shape"),
        (-torch.ones(12), "finite and not negative"),
        (torch.full((12,), torch.nan), "finite and not negative"),
    ],
    ids=["length", "negative", "nan"],
)
def test_bad_weights_are_refused(data, weights, text) -> None:
    with pytest.raises(ValueError, match=text):
        influence(nn.Linear(4, 1).double(), nn.MSELoss(), *data, damping=DAMPING, weights=weights)
