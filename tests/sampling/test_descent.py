"""The descent that is left from the weights to the minimum near them."""

from __future__ import annotations

import pytest
import torch
from analytic_models import FP64, linear_regression
from torch import Tensor, nn

from curvlab.sampling import default_nbeta, descent_to_minimum, estimate_llc


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
    assert found > 0.1
    assert found == pytest.approx(nbeta * (losses[0] - losses[1]), rel=1e-6)
    assert torch.equal(model.weight.flatten(), start[:-1])


def test_at_a_minimum_nothing_is_left() -> None:
    model, data = displaced(0.0)
    assert descent_to_minimum(model, nn.MSELoss(), data, localization=1.0) == pytest.approx(0.0, abs=1e-9)


def test_it_is_what_the_estimate_lacks() -> None:
    """A start above the minimum lowers the estimate by the descent, and the sum is P/2 again."""
    settings = {"num_chains": 8, "num_draws": 300, "num_burnin_steps": 250, "step_size": 1e-3, "batch_size": 400}
    found = {}
    for by in (0.0, 0.1):
        model, data = displaced(by)
        generator = torch.Generator().manual_seed(0)
        llc = estimate_llc(model, nn.MSELoss(), data, **settings, localization=0.1, generator=generator)
        found[by] = llc.value, descent_to_minimum(model, nn.MSELoss(), data, localization=0.1)
    (at_minimum, _), (above, descent) = found.values()
    assert above < at_minimum - 0.5
    assert above + descent == pytest.approx(at_minimum, rel=0.05)
    with pytest.raises(ValueError, match="nbeta must be positive"):
        descent_to_minimum(model, nn.MSELoss(), data, localization=1.0, nbeta=0.0)
