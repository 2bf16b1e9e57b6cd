"""Self-influence where the training loss weighs its examples, against ridge regressions without one of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import estimated_self_influence, self_influence
from curvlab.solvers import Direct

DAMPING, SIZE = 0.1, 12
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)
EXACT = {"damping": DAMPING, "solver": Direct(), "weights": WEIGHTS, "batch_size": 5}


def ridge(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the minimum of 1/N Σ w_i (y_i - θᵀx_i)² + DAMPING/2 |θ|² by its normal equations, (F,)."""
    matrix = 2 / len(x) * x.T @ (weights[:, None] * x) + DAMPING * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(matrix, 2 / len(x) * x.T @ (weights * y))


@pytest.fixture
def problem(generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = (torch.randn(SIZE, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(x, y[:, 0], WEIGHTS)[None])
    return model, x, y


def test_it_is_the_derivative_of_leaving_a_weighted_example_out(problem) -> None:
    model, x, y = problem
    found = self_influence(model, nn.MSELoss(), (x, y), columns=5, **EXACT)

    def losses(weights: Tensor) -> Tensor:
        return (y[:, 0] - x @ ridge(x, y[:, 0], weights)).square()

    step = 1e-5  # of the way to leaving it out
    for k in range(SIZE):
        taken = torch.zeros(SIZE, dtype=torch.float64)
        taken[k] = step * WEIGHTS[k]
        slopes = (losses(WEIGHTS - taken) - losses(WEIGHTS + taken)) / (2 * step)
        torch.testing.assert_close(found.own[k], slopes[k], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.total[k], (WEIGHTS * slopes).mean(), rtol=1e-6, atol=1e-9)


def test_chosen_points_keep_their_own_weights(problem) -> None:
    model, x, y = problem
    whole = self_influence(model, nn.MSELoss(), (x, y), **EXACT)
    some = torch.tensor([4, 0, 10])
    found = self_influence(model, nn.MSELoss(), (x, y), points=some, **EXACT)
    torch.testing.assert_close(found.own, whole.own[some])
    torch.testing.assert_close(found.total, whole.total[some])


def test_the_estimate_is_that_of_the_weighted_matrix(problem) -> None:
    model, x, y = problem
    exact = self_influence(model, nn.MSELoss(), (x, y), **EXACT)
    found = estimated_self_influence(model, nn.MSELoss(), (x, y), num_probes=4000, columns=4000, **EXACT)
    torch.testing.assert_close(found.own, exact.own, rtol=5 * (2 / 4000) ** 0.5, atol=0)
    torch.testing.assert_close(found.total, exact.total, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("function", [self_influence, estimated_self_influence])
def test_bad_weights_are_refused(problem, function) -> None:
    model, x, y = problem
    settings = {"num_probes": 2} if function is estimated_self_influence else {}
    for weights, text in ((torch.ones(11), "one weight for each of 12 examples"), (-WEIGHTS, "not negative")):
        with pytest.raises(ValueError, match=text):
            function(model, nn.MSELoss(), (x, y), damping=DAMPING, weights=weights, **settings)
