"""The curvature at the chains' ends, and the estimates that it shows to be none."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from curvlab.problem.memory import MemoryWarning
from curvlab.sampling import (
    LLC,
    SGLD,
    ChainTraces,
    RMSProp,
    SettingsWarning,
    UnderdampedLangevin,
    choose_sgld_settings,
    default_nbeta,
    estimate_llc,
    measure_ends,
)
from curvlab.training import EnsembleLosses, train
from tests.sampling.analytic_models import (
    FP64,
    Polynomial,
    ReducedRank,
    Stretched,
    half_square,
    linear_regression,
    mean_output,
    no_inputs,
    quadrature,
)


def test_they_are_those_of_a_quadratic() -> None:
    """K = Σ h w²/2: λmax, ε (nβ λmax + γ)/4, and nβ tr(H)/2 times the localization's variance after N steps."""
    curvatures, nbeta, localization, step_size = [9.0, 4.0, 1.0], 50.0, 30.0, 1e-3
    losses = EnsembleLosses(Stretched(curvatures), mean_output, no_inputs())
    settings = {"step_size": step_size, "nbeta": nbeta, "localization": localization, "batch_size": 8}
    for sampler in (SGLD(losses, **settings), UnderdampedLangevin(losses, **settings, friction=20.0)):
        traces = ChainTraces(*torch.zeros(2, 4, 60, dtype=FP64), torch.randn(4, 3, dtype=FP64))
        ends = [measure_ends(sampler, traces, seed=seed) for seed in range(20)]
        assert ends[0].top_eigenvalue == pytest.approx(9.0)
        assert ends[0].stability == pytest.approx(step_size * (nbeta * 9 + localization) / 4)
        variance = (1 - math.exp(-localization * step_size * sampler.reach * 60)) / localization
        found = sum(own.unheld_value for own in ends) / len(ends)
        assert found == pytest.approx(nbeta * 14 / 2 * variance, rel=0.1)


def test_a_preconditioned_step_is_measured_in_its_own_metric() -> None:
    losses = EnsembleLosses(Stretched([9.0, 4.0]), mean_output, no_inputs())
    settings = {"step_size": 1e-3, "nbeta": 50.0, "localization": 30.0, "batch_size": 8}
    sampler = SGLD(losses, **settings, preconditioner=RMSProp(), num_burnin_steps=2)
    scales = torch.tensor([[0.5, 3.0]], dtype=FP64)
    traces = ChainTraces(*torch.zeros(2, 1, 60, dtype=FP64), torch.zeros(1, 2, dtype=FP64), scales)
    ends = measure_ends(sampler, traces, seed=0)
    assert ends.stability == pytest.approx(1e-3 * 3.0 * (50 * 4 + 30) / 4)  # G κ: 0.5 x 480 and 3 x 230


def test_a_diverged_chain_has_no_curvature() -> None:
    losses = EnsembleLosses(Stretched([1.0]), mean_output, no_inputs())
    sampler = SGLD(losses, step_size=1.0, nbeta=1.0, localization=0.0, batch_size=8)
    ends = measure_ends(sampler, ChainTraces(*torch.full((3, 2, 1), math.nan, dtype=FP64)), seed=0)
    assert math.isnan(ends.stability)


def test_products_take_half_the_examples_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = linear_regression(60, 2, seed=0)
    losses, sizes = EnsembleLosses(model, nn.MSELoss(), data), []
    whole = EnsembleLosses.hessian_product

    def limited(own: EnsembleLosses, position: Tensor, batch: tuple[Tensor, Tensor], *rest, **options) -> Tensor:
        sizes.append(len(batch[1]))
        if len(batch[1]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(own, position, batch, *rest, **options)

    monkeypatch.setattr(EnsembleLosses, "hessian_product", limited)
    sampler = SGLD(losses, step_size=1e-3, nbeta=1.0, localization=1.0, batch_size=32)
    traces = ChainTraces(*torch.zeros(2, 1, 5, dtype=FP64), losses.start[None])
    with pytest.warns(MemoryWarning, match="curvature at the ends is now that of 8 examples"):
        assert measure_ends(sampler, traces, seed=0).top_eigenvalue > 0
    assert sizes[:3] == [32, 16, 8]


# ------------------------------------------------------------------- digits, as a new user tries them
@cache
def digits(num_epochs: int = 20) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return 1,000 digits and a network 64-16-10 trained on them."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs = torch.tensor(found.data[:1000], dtype=torch.float32) / 16
    data = inputs, torch.tensor(found.target[:1000])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    generator = torch.Generator().manual_seed(0)
    if num_epochs:
        settings = {"num_epochs": num_epochs, "batch_size": 50, "lr": 0.2}
        train(model, nn.CrossEntropyLoss(), data, **settings, generator=generator)
    return model, data


BATCHES = {"batch_size": 256, "num_burnin_steps": 300}


def named(llc: LLC) -> set[str]:
    return {problem.split(":")[0] for problem in llc.problems}


def test_a_coefficient_that_is_zero_by_construction_is_invalid() -> None:
    """Localization 2.6e7 at 1,000 examples is a cut-off of 1.8e5; the largest curvature is about 1."""
    model, data = digits()
    llc = estimate_llc(
        model,
        nn.CrossEntropyLoss(),
        data,
        num_chains=4,
        num_draws=300,
        **BATCHES,
        step_size=3 / (2.6e7 * 300),
        localization=2.6e7,
        generator=0,
    )
    assert abs(llc.value) < 0.02
    assert llc.curvature_cutoff == pytest.approx(1.8e5, rel=0.01)
    assert llc.top_eigenvalue < 3
    assert {"the localization holds every direction", "the loss did not hold the chains"} <= named(llc)
    assert abs(llc.value) <= 2 * llc.stderr
    assert "the estimate is 0 within its error" in named(llc)


def test_settings_that_were_not_found_warn_and_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvlab.sampling.pilots._MAX_ROUNDS", 3)  # of 8: more find nothing either
    # Not trained: no minimum, and chains fall at any localization but a huge one.
    model, data = digits(num_epochs=0)
    loss, short = nn.CrossEntropyLoss(), BATCHES | {"num_burnin_steps": 100}
    with pytest.warns(SettingsWarning, match="settings not to be used: "):
        chosen = choose_sgld_settings(model, loss, data, **short, generator=0)
    assert not chosen.converged
    assert chosen.problem == chosen.report[-1]
    llc = estimate_llc(model, loss, data, num_chains=4, num_draws=20, **short, settings=chosen, generator=0)
    assert llc.problems[0] == f"the settings are not to be used: {chosen.problem}"
    assert (llc.step_size, llc.localization, llc.nbeta) == (chosen.step_size, chosen.localization, chosen.nbeta)
    with pytest.raises(ValueError, match="either settings, or step_size"):
        estimate_llc(
            model, loss, data, num_chains=4, num_draws=20, **BATCHES, settings=chosen, nbeta=3.0, generator=0
        )


def test_chosen_settings_give_digits_a_valid_estimate() -> None:
    model, data = digits()
    chosen = choose_sgld_settings(model, nn.CrossEntropyLoss(), data, **BATCHES, generator=0)
    llc = estimate_llc(
        model, nn.CrossEntropyLoss(), data, num_chains=4, num_draws=600, **BATCHES, settings=chosen, generator=1
    )
    assert llc.valid, llc.problems
    assert 4 < llc.value < 20
    assert llc.curvature_cutoff < llc.top_eigenvalue / 10


# ------------------------------------------------- a singular network: flat at w0, steep where chains live
def test_a_step_that_is_unstable_where_the_chains_live_is_invalid() -> None:
    """Reduced-rank regression: λmax is 2 at w0, a stability of 0.2, and ten times that where chains go."""
    pattern = (12, 12, 12, 6)
    model, inputs = ReducedRank(*pattern), math.sqrt(12) * torch.eye(12, dtype=FP64)
    data, nbeta = (inputs, model(inputs).detach()), 1000.0
    settings = {"num_chains": 4, "num_draws": 600, "num_burnin_steps": 400, "batch_size": 12, "nbeta": nbeta}
    found = {}
    for step_size in (4e-4, 2e-5):
        at_start = step_size * (nbeta * 2 + 1.0) / 4
        assert at_start < 0.25
        found[step_size] = estimate_llc(
            model, half_square, data, step_size=step_size, localization=1.0, **settings, generator=0
        )
    large, small = found.values()
    assert large.stability > 0.25
    assert "the step is too large where the chains are" in named(large)
    assert small.stability < 0.25
    assert "the step is too large where the chains are" not in named(small)


def test_a_chain_that_the_way_threw_off_is_a_problem_though_its_end_is_sound() -> None:
    """K = w1² w2², in whose arms the curvature grows without bound: SGLD has 1.9 of the value by quadrature."""
    nbeta = default_nbeta(10_000)
    truth = quadrature((2, 2), nbeta=nbeta, localization=1.0)
    llc = estimate_llc(
        Polynomial((2, 2), product=True),
        mean_output,
        no_inputs(),
        num_chains=8,
        num_draws=600,
        num_burnin_steps=400,
        step_size=1e-3,
        batch_size=8,
        nbeta=nbeta,
        localization=1.0,
        generator=0,
    )
    assert llc.value > 1.5 * truth
    assert llc.stability < 0.25
    (problem,) = llc.problems
    assert problem.startswith("a chain was thrown off: its highest draw is ")


@pytest.mark.parametrize("noise", [0.0, 30.0])
def test_draws_of_equilibrium_are_never_thrown_off(noise: float) -> None:
    """Of the energy of a singular model, Gamma(λ), with what a small batch adds; one draw far up is seen."""
    generator = torch.Generator().manual_seed(0)
    for coefficient in (0.05, 1.0, 30.0):
        energies = torch._standard_gamma(torch.full((4, 3000), coefficient, dtype=FP64), generator=generator)
        draws = energies + noise * torch.randn(4, 3000, generator=generator, dtype=FP64)
        settings = {"initial_loss": 0.0, "nbeta": 1.0, "step_size": 1.0, "localization": 0.0, "num_examples": 9}
        assert "a chain was thrown off" not in named(
            LLC.of_traces(draws, draws[:, :0], **settings, num_gradients=0)
        )
        draws[1, 7] = 600.0
        assert "a chain was thrown off" in named(LLC.of_traces(draws, draws[:, :0], **settings, num_gradients=0))
