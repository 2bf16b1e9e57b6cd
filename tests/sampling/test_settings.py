"""Around the chains: descent to the minimum, settings that are searched, diagnostics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import signal, stats
from torch import Tensor, nn

from curvlab.sampling import (
    LLC,
    SettingsWarning,
    choose_sgld_settings,
    default_nbeta,
    descent_to_minimum,
    drift,
    effective_sample_size,
    estimate_llc,
    split_rhat,
)
from tests.refusals import refuses
from tests.sampling.analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs


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
    lifted = above.from_lowest_point(descent)
    assert lifted.value == pytest.approx(above.value + descent)
    assert lifted.value == pytest.approx(at_minimum.value, rel=0.05)
    assert lifted.initial_loss == pytest.approx(at_minimum.initial_loss)
    assert lifted.wbic == pytest.approx(above.wbic)  # n E[L], whatever it is measured from
    torch.testing.assert_close(lifted.losses, above.losses, rtol=1e-6, atol=1e-9)
    assert (lifted.rhat, lifted.stderr) == (pytest.approx(above.rhat), pytest.approx(above.stderr))


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
    assert made_up(10.0).from_lowest_point(1.3).valid


def test_below_the_start_is_no_problem_above_the_minimum() -> None:
    raw = made_up(10.0, dip=-5.0)
    assert raw.problems[0].startswith("the loss falls below the start")
    assert raw.from_lowest_point(6.0).valid
    assert not raw.from_lowest_point(2.0).valid  # still below by 3
    negative = made_up(-14.0)
    assert not negative.valid
    assert negative.from_lowest_point(142.0).valid
    for descent in (-1.0, math.inf, math.nan):
        refuses("must be finite and not negative", raw.from_lowest_point, descent)


# -------------- The step size, friction and localization that `choose_sgld_settings` finds
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


@pytest.mark.parametrize(
    ("case", "sampler"), [("regular", "sgld"), ("regular", "averaged"), ("singular", "underdamped")]
)
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
    assert chosen.report[-1].startswith("chosen: step size")
    assert str(chosen).startswith(f"sampler settings: step size {chosen.step_size:.3g}, localization")
    assert len(repr(chosen).splitlines()) == 2
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


# ----------------------------------------------------------------------------------------
def autoregressive(correlation: float, num_chains: int = 6, length: int = 4000) -> Tensor:
    noise = torch.randn(num_chains, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise[:, 1:] *= math.sqrt(1 - correlation**2)
    return torch.from_numpy(signal.lfilter([1.0], [1.0, -correlation], noise.numpy()))  # x_t = c x_{t-1} + e_t


def normal_scores(values: np.ndarray) -> np.ndarray:
    ranks = stats.rankdata(values).reshape(values.shape)
    return stats.norm.ppf((ranks - 3 / 8) / (values.size + 1 / 4))


def plain_rhat(halves: np.ndarray) -> float:
    length = halves.shape[1]
    within, between = halves.var(axis=1, ddof=1).mean(), halves.mean(axis=1).var(ddof=1)
    return math.sqrt(((length - 1) / length * within + between) / within)


def test_rhat_by_hand() -> None:
    """Vehtari et al. (2021), Sec. 4.1 and 4.2: the larger of the ranks' and of the folded ranks'."""
    draws = torch.randn(3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws[0] *= 3
    halves = np.concatenate([draws[:, :5], draws[:, 6:]])
    folded = np.abs(halves - np.median(halves))
    both = [plain_rhat(normal_scores(values)) for values in (halves, folded)]
    assert both[1] > both[0] + 0.05  # chains of different width
    assert split_rhat(draws) == pytest.approx(max(both))


def test_one_chain_is_two() -> None:
    draws = autoregressive(0.5, num_chains=1)
    assert split_rhat(draws) == split_rhat(torch.stack([draws[0, :2000], draws[0, 2000:]]))
    assert split_rhat(draws + torch.linspace(0, 4, 4000)) > 1.2


def test_rhat_sees_shifts_and_trends() -> None:
    draws = autoregressive(0.0)
    assert split_rhat(draws) == pytest.approx(1.0, abs=2e-3)
    assert split_rhat(draws + torch.arange(6.0)[:, None]) > 1.5
    assert split_rhat(draws + torch.linspace(0, 4, 4000)) > 1.2


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, -0.4])
@pytest.mark.parametrize("kind", ["mean", "bulk"])
def test_effective_sample_size_of_autoregressive_chains(correlation: float, kind: str) -> None:
    expected = 6 * 20_000 * (1 - correlation) / (1 + correlation)
    found = effective_sample_size(autoregressive(correlation, length=20_000), kind)
    assert found == pytest.approx(expected, rel=0.15)


def test_the_tails_are_those_of_indicators() -> None:
    draws = autoregressive(0.8)
    low, high = np.quantile(draws.numpy(), [0.05, 0.95])
    both = [effective_sample_size((draws <= value).double()) for value in (low, high)]
    assert effective_sample_size(draws, "tail") == pytest.approx(min(both), rel=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.7, 0.9])
def test_the_drift_and_its_error_are_known(correlation: float) -> None:
    """Var of a least-squares change over n points: 12 n/(n² - 1) sigma², times (1 + phi)/(1 - phi) for AR(1)."""
    draws = autoregressive(correlation, length=20_000) + torch.linspace(-1.5, 1.5, 20_000, dtype=torch.float64)
    found = drift(draws)
    expected = math.sqrt(12 / (6 * 20_000) * (1 + correlation) / (1 - correlation))
    assert found.stderr == pytest.approx(expected, rel=0.1)
    assert abs(found.change - 3.0) < 4 * expected
    assert found.z == pytest.approx(found.change / found.stderr)
    steep = drift(7 - 2 * torch.linspace(0.0, 1.0, 50, dtype=torch.float64).repeat(3, 1) + 1e-9 * draws[:3, :50])
    assert steep.change == pytest.approx(-2.0)


def test_chains_in_different_places_are_worth_little() -> None:
    assert effective_sample_size(autoregressive(0.0) + 5 * torch.arange(6.0)[:, None]) < 30


@pytest.mark.parametrize("draws", [torch.zeros(2, 3), torch.ones(2, 50), torch.full((2, 50), math.inf)])
def test_nothing_to_say(draws: Tensor) -> None:
    assert math.isnan(split_rhat(draws))
    assert math.isnan(effective_sample_size(draws))
    assert math.isnan(drift(draws).z)
