"""The learning coefficient: its estimate, and of weighted examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from curvlab.sampling import (
    LLC,
    RMSProp,
    choose_sgld_settings,
    default_nbeta,
    descent_to_minimum,
    estimate_llc,
)
from curvlab.sampling.diagnostics import problems_of
from curvlab.training import EnsembleLosses
from tests.refusals import refuses
from tests.sampling.analytic_models import FP64, Polynomial, linear_regression, mean_output, no_inputs


def estimate(model: nn.Module | None = None, data: Any = None, loss: Any = None, **changes: Any) -> LLC:
    regression, examples = linear_regression(300, 3, seed=0)
    settings = {
        "num_chains": 4,
        "num_draws": 300,
        "num_burnin_steps": 150,
        "step_size": 5e-4,
        "batch_size": 100,
        "localization": 1.0,
        "generator": 0,
    } | changes
    return estimate_llc(model or regression, loss or nn.MSELoss(), data or examples, **settings)


def made_up(draws: Tensor, burnin: Tensor | None = None, **changes: Any) -> LLC:
    settings = {"initial_loss": 0.5, "nbeta": 2.0, "step_size": 1e-4, "localization": 3.0, "num_examples": 300}
    before = draws[:, :0] if burnin is None else burnin
    return LLC.of_traces(draws, before, num_gradients=80_000, **(settings | changes))


def mixed(value: float = 10.0, num_draws: int = 200) -> Tensor:
    noise = torch.randn(4, num_draws, generator=torch.Generator().manual_seed(0), dtype=FP64)
    return value + noise


def named(llc: LLC) -> list[str]:
    assert llc.valid == (not llc.problems)
    return [problem.split(":")[0].split(" (")[0] for problem in llc.problems]


def test_definitions() -> None:
    llc = estimate(steps_per_draw=2)
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    initial = float((model(inputs).detach() - targets).square().mean())
    assert llc.initial_loss == pytest.approx(initial)
    assert llc.nbeta == pytest.approx(300 / math.log(300))
    assert llc.losses.shape == (4, 300)
    assert llc.burnin_losses.shape == (4, 150)
    torch.testing.assert_close(llc.per_chain, llc.nbeta * (llc.losses.mean(1) - initial))
    assert llc.value == pytest.approx(float(llc.per_chain.mean()))
    assert llc.stderr == pytest.approx(float(llc.per_chain.std()) / 2)
    assert llc.wbic == pytest.approx(300 * float(llc.losses.mean()))
    assert llc.num_gradients == 4 * (150 + 600) * 100
    low, high = llc.interval()
    assert high - low == pytest.approx(2 * 3.18245 * llc.stderr, rel=1e-4)
    assert llc.valid, llc.problems


def test_more_chains_begin_with_the_same() -> None:
    short = {"num_draws": 30, "num_burnin_steps": 20}
    first, more = estimate(**short), estimate(**short, num_chains=6)
    torch.testing.assert_close(more.per_chain[:4], first.per_chain, rtol=1e-8, atol=1e-10)


def test_the_batch_noise_of_the_start_is_taken_out() -> None:
    llc = estimate(step_size=1e-9, num_draws=50)  # hardly moves: all that is left is rounding and first order
    model, (inputs, targets) = linear_regression(300, 3, seed=0)
    plain = float((model(inputs).detach() - targets).square().std()) / math.sqrt(100)
    assert float(llc.losses.std()) < 1e-2 * plain


def test_one_chain_has_an_interval_too() -> None:
    llc = estimate(num_chains=1, num_draws=1000)
    assert 0 < llc.stderr < 0.5
    assert abs(llc.value - 2) < 5 * llc.stderr + 0.2


# ------------------------------------------------------------------------------------------ problems
def test_chains_that_have_not_mixed_or_still_move_are_invalid() -> None:
    apart = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=FP64)[:, None]
    assert named(made_up(mixed() + apart)) == ["the chains have not mixed"]
    assert named(made_up(mixed())) == []
    trend = torch.linspace(0.6, 1.4, 400, dtype=FP64)
    noise = torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=FP64)
    assert named(made_up(10 * trend + 20 * noise)) == ["the loss still moves"]
    found = named(estimate(step_size=2e-6, num_burnin_steps=0, localization=1e-6))
    assert "the loss still moves" in found or "the chains have not mixed" in found


@pytest.mark.parametrize(
    ("ess", "ess_tail", "enough"), [(41.0, 41.0, True), (39.0, 90.0, False), (90.0, 39.0, False)]
)
def test_ten_effective_draws_are_asked_of_each_chain(ess: float, ess_tail: float, enough: bool) -> None:
    draws = mixed(num_draws=20)
    found = problems_of(draws, draws[:, :0], rhat=1.0, ess=ess, ess_tail=ess_tail, stderr=0.1)
    assert [problem.split(":")[0] for problem in found] == (
        [] if enough else ["too few draws to see whether the chains have mixed"]
    )


def test_a_start_that_is_no_minimum_is_invalid() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=FP64))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.w.square().sum().expand(len(inputs))

    llc = estimate(Slope(), no_inputs(), mean_output, nbeta=100.0, batch_size=8, num_burnin_steps=300)
    assert llc.value < 0
    assert any("falls below the start" in problem for problem in llc.problems)
    dip = made_up(mixed(), mixed(-5.0)[:, :100])
    assert named(dip) == ["the loss falls below the start"]
    assert "(by 10.1 in units" in dip.problems[0]


def test_diverged_and_short_chains_are_invalid() -> None:
    diverged = estimate(step_size=1.0, num_draws=50)
    assert "smaller step_size" in diverged.problems[0]
    assert math.isnan(diverged.stability)
    assert "too few draws" in estimate(num_draws=3).problems[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stability": 0.26}, "the step is too large where the chains are"),
        ({"top_eigenvalue": 1.4}, "the localization holds every direction"),
        ({"unheld_value": 24.0}, "the loss did not hold the chains"),
        ({"settings_problem": "no step"}, "the settings are not to be used"),
        ({"descent": 2.5}, "the start lies above the minimum near it"),
        ({"stability": 0.24, "top_eigenvalue": 1.6, "unheld_value": 26.0, "descent": 1.0}, None),
    ],
)
def test_what_was_measured_at_the_ends_may_be_a_problem(changes: dict[str, Any], problem: str | None) -> None:
    """The cut-off is 1.5; the estimate 20 ± 0.1."""
    assert named(made_up(mixed(), **changes)) == ([] if problem is None else [problem])


def test_from_the_minimum_the_localization_alone_gives_more_too() -> None:
    raw = made_up(mixed(4.0), unheld_value=20.0)  # 8 of 20; from a minimum that is 15 below 23 of 35
    assert raw.from_lowest_point(15.0).valid
    assert raw.from_lowest_point(15.0).unheld_value == 35.0


def test_an_estimate_of_0_within_its_error_is_invalid() -> None:
    apart = torch.tensor([-0.3, -0.1, 0.2, 0.6], dtype=FP64)[:, None]
    assert "the estimate is 0 within its error" in named(made_up(mixed(0.05) + apart))
    assert named(made_up(mixed(0.5))) == []  # 7 standard errors


# ------------------------------------------------------------------------------------------- display
def axes() -> Axes:
    return Figure().add_subplot()


def test_it_prints_value_error_cost_and_mixing_in_two_lines() -> None:
    llc = made_up(mixed(), mixed()[:, :50], stability=0.125)
    first, second = str(llc).splitlines()
    assert first == f"LLC {llc.value:.4g} ± {llc.stderr:.2g} (standard error, 4 chains x 200 draws)"
    assert f"80,000 example gradients, R-hat {llc.rhat:.3f}" in second
    assert second.endswith("localization 3, stability 0.12")
    assert repr(llc) == str(llc)  # no tensors in a notebook's output either
    apart = made_up(mixed() + torch.arange(4.0)[:, None])
    assert "not to be used: the chains have not mixed" in str(apart)
    assert "not to be used" in apart._repr_html_()
    assert "not to be used" not in llc._repr_html_()
    assert "not to be used" in apart.plot(axes()).get_title()


def test_running_means_end_at_the_chains_estimates() -> None:
    llc = made_up(mixed(), mixed()[:, :50])
    drawn = llc.plot(axes())
    assert drawn.get_title() == ""
    ends = {line.get_label(): line.get_ydata()[-1] for line in drawn.lines if line.get_label().startswith("chain")}
    assert list(ends.values()) == pytest.approx(llc.per_chain.tolist())
    assert drawn.get_xlim()[0] < -50  # the burn-in stands before 0


def test_kept_traces_give_the_same_estimate() -> None:
    llc = made_up(mixed(), mixed()[:, :50], stability=0.3, settings_problem="no step")
    again = LLC.of_traces(**llc.traces())
    assert again.value == pytest.approx(llc.value, rel=1e-6)
    assert again.stderr == pytest.approx(llc.stderr, rel=1e-5)
    assert (again.nbeta, again.localization, again.num_gradients) == (2.0, 3.0, 80_000)
    assert again.problems == llc.problems
    torch.testing.assert_close(again.losses, llc.losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(again.burnin_losses, llc.burnin_losses, rtol=1e-6, atol=0.0)
    kept = sum(part.nbytes for part in llc.traces().values() if isinstance(part, torch.Tensor))
    assert kept == 4 * (200 + 50) * 4


# ------------------------------------------------------------------------------- calls and arguments


def test_bad_settings_models_and_levels() -> None:
    refuses("pass step_size, or settings=choose_sgld_settings", estimate, step_size=None)
    refuses("a preconditioner is for SGLD alone", estimate, friction=1.0, preconditioner=RMSProp())
    refuses("pass nbeta", default_nbeta, 2)
    refuses(r"0\.95", estimate(num_draws=10).interval, 95)
    refuses(r"Pass model.float\(\)", estimate, nn.Linear(3, 1).bfloat16(), (torch.ones(5, 3), torch.ones(5, 1)))


def test_language_models_with_ignored_targets() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 1}
    config = transformers.OPTConfig(
        vocab_size=20, num_attention_heads=2, max_position_embeddings=16, dropout=0.5, **sizes
    )
    model = transformers.OPTForCausalLM(config).train()
    tokens = torch.randint(3, 20, (12, 6), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[::2, 3:] = -100
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    short = {"num_draws": 5, "num_burnin_steps": 0, "step_size": 1e-6, "batch_size": 4}
    llc = estimate(model, (inputs, targets), nn.CrossEntropyLoss(), **short)
    logits = model.eval()(**inputs).logits.detach()
    expected = float(nn.CrossEntropyLoss()(logits.transpose(1, 2), targets))
    assert llc.initial_loss == pytest.approx(expected, rel=1e-5)
    assert bool(torch.isfinite(llc.losses).all())
    assert llc.top_eigenvalue > 0


def test_flat_polynomials_have_no_curvature_to_hold_them() -> None:
    """At w = 0 of w⁴ all curvature is 0, but not where the chains end."""
    llc = estimate(
        Polynomial((4,), product=False), no_inputs(), mean_output, nbeta=100.0, batch_size=8, num_chains=20
    )
    assert llc.top_eigenvalue > llc.curvature_cutoff


# --- The learning coefficient of a weighted mean loss: a quadratic, for which it is known at any temperature
NUM_EXAMPLES, NUM_FEATURES = 200, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted_regression() -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """Return a linear model at the minimum of its weighted loss, data, and weights from 0 to 3."""
    inputs = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=generator(1), dtype=FP64)
    noise = 0.3 * torch.randn(NUM_EXAMPLES, 1, generator=generator(2), dtype=FP64)
    targets = inputs.sum(1, keepdim=True) + noise
    # The weights follow the first feature: they change the spectrum, not only its scale.
    weights = (3 * inputs[:, 0].abs()).clamp(max=3.0) * (torch.arange(NUM_EXAMPLES) % 4 > 0)
    root = weights.sqrt()[:, None]
    model = nn.Linear(NUM_FEATURES, 1, bias=False).to(FP64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(root * inputs, root * targets).solution.T)
    return model, (inputs, targets), weights


def coefficient(inputs: Tensor, weights: Tensor, *, nbeta: float, localization: float) -> float:
    """Return 1/2 Σ nbeta e / (nbeta e + localization), e eigenvalues of the Hessian 2/n Σ w_i x_i x_iᵀ."""
    hessian = 2 / len(inputs) * inputs.T @ (weights[:, None] * inputs)
    stiffness = nbeta * torch.linalg.eigvalsh(hessian)
    return 0.5 * float((stiffness / (stiffness + localization)).sum())


@pytest.mark.parametrize("batch_size", [50, NUM_EXAMPLES], ids=["batches", "all data"])
def test_llc_of_a_weighted_quadratic(batch_size: int) -> None:
    model, (inputs, targets), weights = weighted_regression()
    nbeta, localization = default_nbeta(NUM_EXAMPLES), 60.0
    expected = coefficient(inputs, weights, nbeta=nbeta, localization=localization)
    plain = coefficient(inputs, torch.ones_like(weights), nbeta=nbeta, localization=localization)
    assert abs(plain / expected - 1) > 0.1  # the weights are seen
    llc = estimate_llc(
        model,
        nn.MSELoss(),
        (inputs, targets),
        num_chains=200,
        num_draws=100,
        num_burnin_steps=100,
        step_size=5e-4,
        batch_size=batch_size,
        localization=localization,
        weights=weights,
        generator=generator(3),
    )
    assert llc.value == pytest.approx(expected, rel=0.05)
    residuals = targets - inputs @ model.weight.detach().T
    assert llc.initial_loss == pytest.approx(float((weights[:, None] * residuals.square()).mean()), rel=1e-9)


def test_losses_gradients_and_hessians_are_those_of_the_weighted_mean() -> None:
    model, (inputs, targets), weights = weighted_regression()
    losses = EnsembleLosses(model, nn.MSELoss(), (inputs, targets), weights=weights)
    rows = torch.tensor([[3, 3, 7], [0, 5, 9]])
    positions = torch.randn(2, NUM_FEATURES, generator=generator(4), dtype=FP64)
    found, (gradients,) = losses.losses_and_gradients(
        positions, losses.batch(rows), shared=False, weights=losses.weights_of(rows, 2)
    )
    for k, chosen in enumerate(rows):
        x, y, w = inputs[chosen], targets[chosen, 0], weights[chosen]
        residual = x @ positions[k] - y
        assert float(found[k]) == pytest.approx(float((w * residual.square()).mean()), rel=1e-10)
        torch.testing.assert_close(gradients[k, 0], 2 / 3 * x.T @ (w * residual))
        vector = positions[1 - k]
        product = losses.hessian_product(
            positions[k], losses.batch(chosen), vector, weights=losses.weights_of(chosen, 1)[0]
        )
        torch.testing.assert_close(product, 2 / 3 * x.T @ (w * (x @ vector)))


def test_settings_and_descent_see_the_weights() -> None:
    model, data, weights = weighted_regression()
    batches = {"batch_size": NUM_EXAMPLES, "num_burnin_steps": 100}
    plain, weighted = (
        choose_sgld_settings(model, nn.MSELoss(), data, **batches, weights=own, generator=generator(5))
        for own in (None, 10 * weights)
    )
    assert weighted.step_size < plain.step_size / 3  # more curvature
    # At the minimum of the weighted loss there is nothing to descend; the plain loss has its own.
    assert descent_to_minimum(model, nn.MSELoss(), data, localization=0.0, weights=weights).value < 1e-9
    assert descent_to_minimum(model, nn.MSELoss(), data, localization=0.0).value > 1e-4
