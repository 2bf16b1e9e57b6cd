"""One step of every sampler against the recursion written out, and the limits that they must have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from analytic_models import FP64, Polynomial, Stretched, linear_regression, mean_output, no_inputs
from torch import Tensor, nn

from curvlab.sampling import SGLD, RMSProp, UnderdampedLangevin, run_chains
from curvlab.training import EnsembleLosses

SETTINGS = {"step_size": 1e-3, "nbeta": 20.0, "localization": 3.0, "batch_size": 7}
SAMPLERS: dict[str, tuple[type[SGLD], dict[str, Any]]] = {
    "sgld": (SGLD, {}),
    "rmsprop": (SGLD, {"preconditioner": RMSProp(decay=0.9, damping=0.2), "num_burnin_steps": 4}),
    "averaged": (UnderdampedLangevin, {"friction": math.inf}),
    "underdamped": (UnderdampedLangevin, {"friction": 12.0}),
}


def sampler_of(kind: str, losses: EnsembleLosses, **changes: Any) -> SGLD:
    made, own = SAMPLERS[kind]
    return made(losses, **(SETTINGS | own | changes))


def quadratic(**changes: Any) -> EnsembleLosses:
    return EnsembleLosses(Polynomial((2,), product=False), mean_output, no_inputs())


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_steps_follow_the_recursion(kind: str) -> None:
    """Welling & Teh (2011); Li et al. (2016), Algorithm 1, without Γ; Leimkuhler & Matthews (2013), BAOAB."""
    model, (inputs, targets) = linear_regression(60, 2, seed=0)
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    design = torch.cat([inputs, torch.ones(60, 1, dtype=FP64)], 1)
    sampler = sampler_of(kind, EnsembleLosses(model, nn.MSELoss(), (inputs, targets)))
    state = sampler.init(generators(3, 4))
    assert state.num_steps == 0
    position, moment, h = state.positions.clone(), torch.zeros(2, 3, dtype=FP64), math.sqrt(1e-3)
    momentum = None if state.momenta is None else state.momenta / h
    kept = 0.0 if kind == "averaged" else math.exp(-12.0 * h)
    for step in range(4):
        state, info = sampler.step(state)
        used = state.draws.used - 1
        for chain in range(2):
            rows = state.draws.indices[chain, used]
            x, y = design[rows], targets[rows, 0]
            residual, noise = x @ position[chain] - y, state.draws.noise[chain, used]
            assert info.losses[chain] == pytest.approx(float(residual.square().mean()), rel=1e-10)
            assert info.start_losses[chain] == pytest.approx(float((x @ start - y).square().mean()), rel=1e-10)
            slope = 2 * x.T @ residual / 7
            drift, metric = 20.0 * slope + 3.0 * (position[chain] - start), torch.ones(3, dtype=FP64)
            if momentum is not None:
                momentum[chain] -= h * drift
                position[chain] += h / 2 * momentum[chain]
                momentum[chain] = kept * momentum[chain] + math.sqrt(1 - kept**2) * noise / h
                position[chain] += h / 2 * momentum[chain]
                continue
            if kind == "rmsprop":  # V stands still after two steps of burn-in
                if step < 2:
                    moment[chain] = slope**2 if step == 0 else 0.9 * moment[chain] + 0.1 * slope**2
                metric = 1 / (0.2 + moment[chain].sqrt())
            position[chain] += -0.5e-3 * metric * drift + metric.sqrt() * noise
        torch.testing.assert_close(state.positions, position, rtol=1e-11, atol=1e-13)
    assert state.num_steps == 4


def test_averaged_noises_are_those_of_two_steps() -> None:
    """Without any force a step is the mean of its noise and of the next step's: Leimkuhler & Matthews (2013)."""
    sampler = sampler_of("averaged", quadratic(), nbeta=0.0, localization=0.0)
    state, noises, places = sampler.init(generators(0)), [], []
    for _ in range(3):
        state, _ = sampler.step(state)
        places.append(float(state.positions))
        noises.append(float(state.draws.noise[0, state.draws.used - 1]))
    moved = [places[1] - places[0], places[2] - places[1]]
    assert moved == pytest.approx([(noises[0] + noises[1]) / 2, (noises[1] + noises[2]) / 2])


def test_noise_has_variance_step_size_and_chains_are_independent() -> None:
    model = Polynomial((2,) * 500, product=False)
    sampler = sampler_of("sgld", EnsembleLosses(model, mean_output, no_inputs()), nbeta=0.0, localization=0.0)
    state = sampler.step(sampler.init(generators(1, 2)))[0]
    assert state.positions.var(1).tolist() == pytest.approx([1e-3, 1e-3], rel=0.2)
    assert abs(torch.corrcoef(state.positions)[0, 1]) < 0.2


@pytest.mark.parametrize("kind", ["sgld", "averaged", "underdamped"])
def test_stationary_variance_on_a_quadratic_knows_the_step_size(kind: str) -> None:
    """ε κ = 2, half of the limit: SGLD doubles the variance, the two others keep it."""
    nbeta, localization, step_size = 40.0, 20.0, 0.02
    stiffness = 2 * nbeta + localization  # K = w²
    sampler = sampler_of(
        kind, quadratic(), nbeta=nbeta, localization=localization, step_size=step_size, batch_size=8
    )
    positions = run_chains(sampler, list(range(4000)), 60).positions
    exact = 1 / (stiffness * ((1 - step_size * stiffness / 4) if kind == "sgld" else 1))
    assert float(positions.var()) == pytest.approx(exact, rel=0.08)


@pytest.mark.parametrize("kind", ["sgld", "underdamped"])
def test_batches_raise_the_temperature_by_what_is_told(kind: str) -> None:
    """1 + m ε s²/4, s² the variance of a batch's gradient of U, m the reach; SGLD has the step's own besides."""

    class Noisy(nn.Module):  # of example ±1 the loss is h w²/2 ± b w
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=FP64))

        def forward(self, signs: Tensor) -> Tensor:
            return 0.5 * self.w**2 + 3.0 * signs[:, 0] * self.w

    signs = torch.tensor([[1.0], [-1.0]] * 8, dtype=FP64)
    settings = {"nbeta": 10.0, "localization": 0.0, "batch_size": 1}
    step_size = 2e-3 if kind == "underdamped" else 5e-3
    losses = EnsembleLosses(Noisy(), mean_output, (signs, signs[:, 0]))
    sampler = sampler_of(kind, losses, step_size=step_size, **settings)
    variance = float(run_chains(sampler, list(range(3000)), 600).positions.var())
    added = sampler.reach * step_size * (10.0 * 3.0) ** 2 / 4
    assert added > 0.9
    own = 1 - step_size * 10.0 / 4 if kind == "sgld" else 1.0
    assert variance * 10.0 == pytest.approx((1 + added) / own, rel=0.1)


def test_less_friction_reaches_further() -> None:
    """A flat direction's variance after N steps is that of SGLD of `reach` times the step size."""
    found = {}
    for kind in ("sgld", "underdamped"):
        sampler = sampler_of(kind, quadratic(), nbeta=0.0, localization=1.0, step_size=1e-4, batch_size=8)
        assert sampler.reach == pytest.approx(1.0 if kind == "sgld" else 2 / (12 * 0.01), rel=0.01)
        variance = float(run_chains(sampler, list(range(2000)), 300).positions.var())
        found[kind] = variance, 1 - math.exp(-1e-4 * 300 * sampler.reach)
    for variance, expected in found.values():
        assert variance == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("kind", ["sgld", "underdamped"])
def test_without_loss_the_localization_alone_decides(kind: str) -> None:
    sampler = sampler_of(kind, quadratic(), nbeta=0.0, localization=50.0, batch_size=8)
    assert float(run_chains(sampler, list(range(3000)), 150).positions.var()) == pytest.approx(1 / 50, rel=0.09)


def test_the_density_of_the_preconditioned_sampler_is_that_of_sgld() -> None:
    """With G constant after the burn-in every parameter has the variance 1/(nbeta h + localization)."""
    curvatures = [100.0, 1.0]
    sampler = SGLD(
        EnsembleLosses(Stretched(curvatures), mean_output, no_inputs()),
        step_size=8e-5,  # adds 5 % to the steep one's
        nbeta=40.0,
        localization=10.0,
        batch_size=8,
        preconditioner=RMSProp(damping=0.05),
        num_burnin_steps=100,
    )
    variances = run_chains(sampler, list(range(3000)), 500).positions.var(0)
    expected = [1 / (40 * curvature + 10) for curvature in curvatures]
    assert variances.tolist() == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("sgld", {"step_size": 0.0}, "step_size"),
        ("sgld", {"nbeta": -1.0}, "nbeta"),
        ("sgld", {"batch_size": 0}, "batch_size"),
        ("rmsprop", {"num_burnin_steps": 0}, "num_burnin_steps of at least 2, got 0"),
        ("underdamped", {"friction": 0.0}, "friction must be positive, got 0.0: without friction"),
    ],
)
def test_bad_settings(kind: str, changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sampler_of(kind, quadratic(), **changes)
