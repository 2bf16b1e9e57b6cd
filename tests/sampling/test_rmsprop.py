"""Preconditioned SGLD: the recursion written out, the density it must keep, and coefficients that are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from analytic_models import (
    FP64,
    ReducedRank,
    aoyagi_watanabe,
    half_square,
    linear_regression,
    mean_output,
    no_inputs,
)
from torch import Tensor, nn

from curvlab.sampling import LLC, SGLD, RMSProp, default_nbeta, estimate_llc, run_chains
from curvlab.training import EnsembleLosses


class Stretched(nn.Module):
    """K(w) = sum_i h_i w_i² / 2: parameters of very different curvature."""

    def __init__(self, curvatures: list[float]) -> None:
        super().__init__()
        self.register_buffer("curvatures", torch.tensor(curvatures, dtype=FP64))
        self.w = nn.Parameter(torch.zeros(len(curvatures), dtype=FP64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (0.5 * self.curvatures * self.w**2).sum().expand(len(inputs))


def test_steps_follow_the_recursion() -> None:
    """Li et al. (2016), Algorithm 1, without Γ; V stands still after two steps of burn-in."""
    model, (inputs, targets) = linear_regression(60, 2, seed=0)
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    design = torch.cat([inputs, torch.ones(60, 1, dtype=FP64)], 1)
    sampler = SGLD(
        EnsembleLosses(model, nn.MSELoss(), (inputs, targets)),
        step_size=1e-3,
        nbeta=20.0,
        localization=3.0,
        batch_size=7,
        preconditioner=RMSProp(decay=0.9, damping=0.2),
        num_burnin_steps=4,
    )
    state = sampler.init([torch.Generator().manual_seed(seed) for seed in (3, 4)])
    position, moment = state.positions.clone(), torch.zeros(2, 3, dtype=FP64)
    for step in range(4):
        state, _ = sampler.step(state)
        used = state.draws.used - 1
        for chain in range(2):
            rows = state.draws.indices[chain, used]
            x, y = design[rows], targets[rows, 0]
            slope = 2 * x.T @ (x @ position[chain] - y) / 7
            if step < 2:
                moment[chain] = slope**2 if step == 0 else 0.9 * moment[chain] + 0.1 * slope**2
            metric = 1 / (0.2 + moment[chain].sqrt())
            drift = metric * (20.0 * slope + 3.0 * (position[chain] - start))
            noise = metric.sqrt() * state.draws.noise[chain, used]
            position[chain] = position[chain] - 0.5e-3 * drift + noise
        torch.testing.assert_close(state.positions, position, rtol=1e-11, atol=1e-13)


def test_the_density_is_that_of_sgld() -> None:
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


def estimate_stretched(preconditioner: RMSProp | None, step_size: float) -> LLC:
    return estimate_llc(
        Stretched([1000.0] * 4 + [1.0] * 4),
        mean_output,
        no_inputs(),
        num_chains=60,
        num_draws=60,
        num_burnin_steps=1200,
        step_size=step_size,
        batch_size=8,
        nbeta=100.0,
        localization=1e-3,
        preconditioner=preconditioner,
        generator=torch.Generator().manual_seed(0),
    )


def test_flat_directions_are_reached_that_sgld_misses() -> None:
    """λ = 4; at a step that adds a seventh to the steep ones' share, SGLD reaches half of the flat ones'."""
    assert estimate_stretched(None, step_size=5e-6).value == pytest.approx(2 * 8 / 7 + 0.92, rel=0.1)
    found = estimate_stretched(RMSProp(damping=0.1), step_size=1e-5)
    assert found.value == pytest.approx(4.0, rel=0.1)


def test_reduced_rank_regression() -> None:
    pattern = (3, 2, 2, 1)
    model, inputs = ReducedRank(*pattern), math.sqrt(3) * torch.eye(3, dtype=FP64)
    llc = estimate_llc(
        model,
        half_square,
        (inputs, model(inputs).detach()),
        num_chains=300,
        num_draws=100,
        num_burnin_steps=1000,
        step_size=2e-5,
        batch_size=3,
        nbeta=default_nbeta(10_000),
        localization=5.0,
        preconditioner=RMSProp(),
        generator=torch.Generator().manual_seed(0),
    )
    assert llc.value == pytest.approx(aoyagi_watanabe(*pattern), rel=0.1)


def estimate(**changes: object) -> LLC:
    settings = {"num_chains": 3, "num_draws": 20, "num_burnin_steps": 10, "step_size": 1e-3, "batch_size": 7}
    model, data = linear_regression(60, 2, seed=0)
    return estimate_llc(
        model,
        nn.MSELoss(),
        data,
        preconditioner=RMSProp(),
        generator=torch.Generator().manual_seed(0),
        **(settings | changes),
    )


def test_a_killed_run_ends_at_the_same_numbers(tmp_path: Path) -> None:
    whole = estimate()

    def interrupt(count: int) -> None:
        taken.append(count)
        if len(taken) == 15:
            raise KeyboardInterrupt

    taken: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        estimate(checkpoint=tmp_path, checkpoint_every=7, on_step=interrupt)
    assert torch.equal(estimate(checkpoint=tmp_path).losses, whole.losses)
    with pytest.raises(ValueError, match="num_burnin_steps"):  # learned over another burn-in
        estimate(checkpoint=tmp_path, num_burnin_steps=12)


def test_chains_do_not_depend_on_chunks() -> None:
    torch.testing.assert_close(estimate(chunk_size=1).losses, estimate(chunk_size=3).losses)


def test_it_needs_a_burn_in_and_a_damping() -> None:
    with pytest.raises(ValueError, match="num_burnin_steps of at least 2, got 0"):
        estimate(num_burnin_steps=0)
    with pytest.raises(ValueError, match=r"decay lies between 0 and 1 and damping is positive, got 0.9 and 0"):
        RMSProp(decay=0.9, damping=0.0)
