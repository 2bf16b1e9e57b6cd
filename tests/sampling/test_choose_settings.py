"""The step size and localization that `choose_sgld_settings` finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs
from torch import Tensor, nn

from curvlab.sampling import choose_sgld_settings, default_nbeta, estimate_llc


@pytest.mark.parametrize("batch_size", [300, 5])
def test_what_the_step_size_adds_is_that_of_a_quadratic(batch_size: int) -> None:
    """ε nbeta [tr(H) + nbeta tr(C_B)] / 8, to first order in ε; with few examples C_B rules."""
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    chosen = choose_sgld_settings(
        model,
        nn.MSELoss(),
        (inputs, targets),
        batch_size=batch_size,
        num_burnin_steps=400,
        generator=torch.Generator().manual_seed(0),
    )
    assert chosen.converged
    assert chosen.localization * chosen.step_size * 400 == pytest.approx(3)
    design = torch.cat([inputs, torch.ones(300, 1, dtype=FP64)], 1)
    trace = float((2 * design.square().mean(0)).sum())
    residuals = (model(inputs) - targets).detach()
    noise = float((2 * residuals * design).var(0, unbiased=False).sum()) / batch_size if batch_size < 300 else 0.0
    assert (chosen.nbeta * noise > trace) == (batch_size == 5)
    added = chosen.step_size * chosen.nbeta * (trace + chosen.nbeta * noise) / 8
    if batch_size == 300:
        assert chosen.bias * chosen.pilot_llc == pytest.approx(added, rel=0.2)
    else:  # C_B is measured by eight batches, where the pilot has gone
        assert 0.6 * added < chosen.bias * chosen.pilot_llc < 2 * added
    stable = 1 / (chosen.nbeta * 2 * float(torch.linalg.matrix_norm(design, 2)) ** 2 / 300 + chosen.localization)
    assert chosen.step_size <= 1.3 * stable


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        return nn.functional.scaled_dot_product_attention(hidden, hidden, inputs).mean((1, 2))[:, None]


def test_settings_are_chosen_for_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 3, 4, generator=generator), torch.randn(40, 1, generator=generator)
    arguments = {"batch_size": 20, "num_burnin_steps": 20, "num_steps": 20, "generator": generator}
    for chunk_size in (None, 1):
        chosen = choose_sgld_settings(Attention(), nn.MSELoss(), data, **arguments, chunk_size=chunk_size)
        assert chosen.step_size > 0


@pytest.mark.parametrize("case", ["regular", "singular"])
def test_chosen_settings_give_a_valid_estimate(case: str) -> None:
    model, data = linear_regression(1000, 4, seed=3)
    loss: Any = nn.MSELoss()
    truth, batch_size = 2.5, 100
    if case == "singular":
        model, data, loss, truth, batch_size = Polynomial((4,), product=False), no_inputs(), mean_output, 0.25, 8
    nbeta = default_nbeta(1000)
    chosen = choose_sgld_settings(
        model,
        loss,
        data,
        batch_size=batch_size,
        num_burnin_steps=400,
        nbeta=nbeta,
        num_chains=64,
        generator=torch.Generator().manual_seed(0),
    )
    assert chosen.converged
    assert chosen.bias < 0.09
    assert "chosen: step_size" in str(chosen)
    llc = estimate_llc(
        model,
        loss,
        data,
        num_chains=64,
        num_draws=400,
        num_burnin_steps=400,
        step_size=chosen.step_size,
        localization=chosen.localization,
        batch_size=batch_size,
        nbeta=nbeta,
        generator=torch.Generator().manual_seed(1),
    )
    assert llc.valid, llc.problems
    assert llc.value == pytest.approx(truth, rel=0.15)


def test_an_asked_localization_is_kept() -> None:
    model, data = linear_regression(300, 3, seed=0)
    chosen = choose_sgld_settings(
        model,
        nn.MSELoss(),
        data,
        batch_size=300,
        num_burnin_steps=50,
        localization=7.0,
        num_steps=20,
        generator=torch.Generator().manual_seed(0),
    )
    assert chosen.localization == 7.0
    assert "as asked" in chosen.report[-1]
    with pytest.raises(ValueError, match="bias between 0 and 1"):
        choose_sgld_settings(
            model, nn.MSELoss(), data, batch_size=9, num_burnin_steps=9, bias=2.0, generator=torch.Generator()
        )
