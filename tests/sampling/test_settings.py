"""The step size, friction and localization that `choose_sgld_settings` finds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs
from torch import Tensor, nn

from curvlab.sampling import SettingsWarning, choose_sgld_settings, default_nbeta, estimate_llc


def regression_settings(**changes: Any) -> Any:
    model, data = linear_regression(300, 3, seed=0)
    arguments = {"batch_size": 300, "num_burnin_steps": 400, "generator": 0} | changes
    return choose_sgld_settings(model, nn.MSELoss(), data, **arguments)


@pytest.mark.parametrize("sampler", ["sgld", "averaged"])
@pytest.mark.parametrize("batch_size", [300, 5])
def test_what_the_settings_add_is_that_of_a_quadratic(batch_size: int, sampler: str) -> None:
    """ε nbeta [tr(H) + nbeta tr(C_B)] / 8, to first order in ε; averaged noises lack tr(H)."""
    chosen = regression_settings(batch_size=batch_size, sampler=sampler)
    assert chosen.converged
    assert chosen.problem == ""
    assert chosen.friction == (None if sampler == "sgld" else math.inf)
    assert chosen.localization * chosen.step_size * 400 == pytest.approx(3)
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    design = torch.cat([inputs, torch.ones(300, 1, dtype=FP64)], 1)
    trace = float((2 * design.square().mean(0)).sum()) if sampler == "sgld" else 0.0
    residuals = (model(inputs) - targets).detach()
    noise = float((2 * residuals * design).var(0, unbiased=False).sum()) / batch_size if batch_size < 300 else 0.0
    added = chosen.step_size * chosen.nbeta * (trace + chosen.nbeta * noise) / 8
    if batch_size == 300:
        assert chosen.bias * chosen.pilot_llc == pytest.approx(added, rel=0.2)
    else:  # C_B is measured by eight batches, where the pilot has gone
        assert 0.6 * added < chosen.bias * chosen.pilot_llc < 2 * added
    top = 2 * float(torch.linalg.matrix_norm(design, 2)) ** 2 / 300
    assert chosen.step_size * (chosen.nbeta * top + chosen.localization) / 4 <= 0.13


def test_less_friction_allows_a_weaker_localization() -> None:
    plain, further = (regression_settings(sampler=sampler) for sampler in ("averaged", "underdamped"))
    assert further.converged
    assert further.localization < plain.localization / 3
    kept = math.exp(-further.friction * math.sqrt(further.step_size))
    reach = (1 + kept) / (1 - kept)
    assert reach * further.step_size * further.localization * 400 == pytest.approx(3)
    assert further.friction >= 1.9 * math.sqrt(further.localization)  # flat directions do not swing


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        return nn.functional.scaled_dot_product_attention(hidden, hidden, inputs).mean((1, 2))[:, None]


@pytest.mark.filterwarnings("ignore::curvlab.sampling.SettingsWarning")
def test_settings_are_chosen_for_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 3, 4, generator=generator), torch.randn(40, 1, generator=generator)
    arguments = {"batch_size": 20, "num_burnin_steps": 20, "num_steps": 20, "generator": generator}
    for chunk_size in (None, 1):
        chosen = choose_sgld_settings(Attention(), nn.MSELoss(), data, **arguments, chunk_size=chunk_size)
        assert chosen.step_size > 0


@pytest.mark.parametrize("sampler", ["sgld", "averaged", "underdamped"])
@pytest.mark.parametrize("case", ["regular", "singular"])
def test_chosen_settings_give_a_valid_estimate(case: str, sampler: str) -> None:
    model, data = linear_regression(1000, 4, seed=3)
    loss: Any = nn.MSELoss()
    truth, batch_size = 2.5, 100
    if case == "singular":
        model, data, loss, truth, batch_size = Polynomial((4,), product=False), no_inputs(), mean_output, 0.25, 8
    nbeta = default_nbeta(1000)
    settings = {"batch_size": batch_size, "num_burnin_steps": 400, "num_chains": 64}
    chosen = choose_sgld_settings(model, loss, data, **settings, nbeta=nbeta, sampler=sampler, generator=0)
    assert chosen.converged, chosen.problem
    assert chosen.bias < 0.05
    assert "chosen: step size" in str(chosen)
    llc = estimate_llc(model, loss, data, **settings, num_draws=400, settings=chosen, generator=1)
    assert llc.valid, llc.problems
    assert llc.value == pytest.approx(truth, rel=0.15)


def test_an_asked_localization_is_kept_or_refused() -> None:
    chosen = regression_settings(num_burnin_steps=50, localization=7.0, num_steps=20)
    assert (chosen.localization, chosen.converged) == (7.0, True)
    assert "as asked" in chosen.report[-1]
    with pytest.warns(
        SettingsWarning, match=r"flat directions relax in [\d,]+ steps, the burn-in has 50: take more"
    ):
        chosen = regression_settings(num_burnin_steps=50, localization=0.2, num_steps=20)
    assert not chosen.converged
    assert "pilot 1: 50 steps" in chosen.report[1]  # as long as the burn-in, no longer
    with pytest.warns(
        SettingsWarning, match="cut-off localization/nbeta = 1.9e\\+05 is above the largest curvature"
    ):
        regression_settings(localization=1e7)


def test_pilots_last_a_relaxation_time() -> None:
    chosen = regression_settings(num_burnin_steps=900, num_steps=20)
    assert "pilot 1: 300 steps" in chosen.report[1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"bias": 2.0}, "bias between 0 and 1"), ({"sampler": "hmc"}, "\"underdamped\", got 'hmc'")],
)
def test_bad_arguments(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        regression_settings(**changes)
