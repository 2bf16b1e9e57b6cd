"""The descent that is left from the weights to the minimum near them."""

from __future__ import annotations

import math

import pytest
import torch
from analytic_models import FP64, linear_regression
from torch import Tensor, nn

from curvlab.sampling import LLC, default_nbeta, descent_to_minimum, estimate_llc


def displaced(by: float) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a linear regression whose weights lie off the least-squares solution."""
    model, data = linear_regression(400, 5, seed=0)
    with torch.no_grad():
        model.weight.add_(by * torch.randn(1, 5, dtype=FP64, generator=torch.Generator().manual_seed(1)))
    return model, data


@pytest.mark.parametrize("localization", [0.0, 3.0, 1e3])
def test_of_a_quadratic_it_is_known(localization: float) -> None:
    model, (inputs, targets) = displaced(0.1)
    design = torch.cat([inputs, torch.ones(400, 1, dtype=FP64)], 1)
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    nbeta, hessian = default_nbeta(400), 2 * design.T @ design / 400
    gradient = hessian @ start - 2 * design.T @ targets.flatten() / 400
    # nbeta L'(w) + γ (w - w0) = 0
    end = start - torch.linalg.solve(nbeta * hessian + localization * torch.eye(6, dtype=FP64), nbeta * gradient)
    losses = [float((design @ w - targets.flatten()).square().mean()) for w in (start, end)]
    found = descent_to_minimum(model, nn.MSELoss(), (inputs, targets), localization=localization)
    assert found.value > 0.1
    assert found.converged
    assert found.value == pytest.approx(nbeta * (losses[0] - losses[1]), rel=1e-6)
    assert torch.equal(model.weight.flatten(), start[:-1])


def test_at_a_minimum_nothing_is_left() -> None:
    model, data = displaced(0.0)
    found = descent_to_minimum(model, nn.MSELoss(), data, localization=1.0)
    assert found.value == pytest.approx(0.0, abs=1e-9)
    assert found.converged


def test_a_search_that_its_steps_end_says_so() -> None:
    model, data = displaced(3.0)
    cut_short = descent_to_minimum(model, nn.MSELoss(), data, localization=1.0, max_steps=2)
    whole = descent_to_minimum(model, nn.MSELoss(), data, localization=1.0)
    assert not cut_short.converged
    assert whole.converged
    assert cut_short.num_steps <= 2 < whole.num_steps
    assert cut_short.value < 0.99 * whole.value


def test_it_is_what_the_estimate_lacks() -> None:
    """A start above the minimum lowers the estimate by the descent, and the sum is P/2 again."""
    settings = {"num_chains": 8, "num_draws": 300, "num_burnin_steps": 250, "step_size": 1e-3, "batch_size": 400}
    found = {}
    for by in (0.0, 0.1):
        model, data = displaced(by)
        generator = torch.Generator().manual_seed(0)
        llc = estimate_llc(model, nn.MSELoss(), data, **settings, localization=0.1, generator=generator)
        found[by] = llc, descent_to_minimum(model, nn.MSELoss(), data, localization=0.1).value
    (at_minimum, _), (above, descent) = found.values()
    assert above.value < at_minimum.value - 0.5
    lifted = above.from_minimum(descent)
    assert lifted.value == pytest.approx(above.value + descent)
    assert lifted.value == pytest.approx(at_minimum.value, rel=0.05)
    assert lifted.initial_loss == pytest.approx(at_minimum.initial_loss)
    assert lifted.wbic == pytest.approx(above.wbic)  # n E[L], whatever it is measured from
    torch.testing.assert_close(lifted.losses, above.losses, rtol=1e-6, atol=1e-9)
    assert (lifted.rhat, lifted.stderr) == (pytest.approx(above.rhat), pytest.approx(above.stderr))
    with pytest.raises(ValueError, match="nbeta must be positive"):
        descent_to_minimum(model, nn.MSELoss(), data, localization=1.0, nbeta=0.0)


def made_up(value: float, *, dip: float = 0.0, descent: float = 0.0) -> LLC:
    """Return an estimate from mixed chains, whose burn-in lies at `dip`."""
    noise = torch.randn(4, 200, generator=torch.Generator().manual_seed(0), dtype=FP64)
    settings = {"initial_loss": 0.3, "nbeta": 1.0, "step_size": 1.0, "localization": 0.0, "num_examples": 9}
    burnin = dip + 0.1 * noise[:, :100]
    return LLC.of_traces(value + noise, burnin, **settings, num_gradients=0, descent=descent)


def test_a_descent_above_a_tenth_of_the_value_is_a_problem() -> None:
    assert made_up(10.0).valid
    assert made_up(10.0, descent=1.0).valid  # of 11
    (problem,) = made_up(10.0, descent=1.3).problems
    assert problem.startswith("the start lies above the minimum near it: the estimate lacks 1.3 of 11.")
    assert made_up(10.0).from_minimum(1.3).valid


def test_below_the_start_is_no_problem_above_the_minimum() -> None:
    raw = made_up(10.0, dip=-5.0)
    assert raw.problems[0].startswith("the loss falls below the start")
    assert raw.from_minimum(6.0).valid
    assert not raw.from_minimum(2.0).valid  # still below by 3
    negative = made_up(-14.0)
    assert not negative.valid
    assert negative.from_minimum(142.0).valid
    for descent in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            raw.from_minimum(descent)
