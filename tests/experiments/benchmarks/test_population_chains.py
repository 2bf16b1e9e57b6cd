"""bench-llc: chains on the exact loss of a deep linear network against autograd, and against a closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.benchmarks.llc.population_chains import langevin_losses


def test_a_step_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    found = langevin_losses(
        start,
        num_chains=1,
        num_steps=3,
        step_size=0.01,
        nbeta=5.0,
        localization=2.0,
        generator=torch.Generator().manual_seed(7),
    )
    draws, target = torch.Generator().manual_seed(7), start[2] @ start[1] @ start[0]
    layers = [layer.clone().requires_grad_() for layer in start]
    expected = []
    for _ in range(3):
        loss = 0.5 * (layers[2] @ layers[1] @ layers[0] - target).square().sum()
        expected.append(float(loss.detach()))
        pull = sum((layer - own).square().sum() for layer, own in zip(layers, start, strict=True))
        gradients = torch.autograd.grad(5.0 * loss + 2.0 / 2 * pull, layers)
        noises = [torch.randn(1, 4, 4, generator=draws)[0] for _ in layers][::-1]  # of the last layer first
        layers = [
            (layer - 0.01 / 2 * gradient + math.sqrt(0.01) * noise).detach().requires_grad_()
            for layer, gradient, noise in zip(layers, gradients, noises, strict=True)
        ]
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_one_layer_is_a_quadratic_with_a_known_mean() -> None:
    nbeta, localization, width = 100.0, 50.0, 6
    losses = langevin_losses(
        [torch.eye(width)],
        num_chains=50,
        num_steps=3000,
        step_size=1e-3,
        nbeta=nbeta,
        localization=localization,
        generator=torch.Generator().manual_seed(0),
    )
    # With a = nbeta + localization w has variance 1/a, and 1 / (1 - a ε / 4) of it by the step's size
    variance = 1 / (nbeta + localization) / (1 - (nbeta + localization) * 1e-3 / 4)
    assert float(losses[300:].mean()) == pytest.approx(width**2 / 2 * variance, rel=0.01)


def test_the_table_has_every_case(run_smoke: Callable[..., Path]) -> None:
    table = pd.read_csv(run_smoke("benchmarks/llc") / "population_chains.csv")
    assert table.case.tolist() == ["short"]
    assert table.relaxation_steps[0] == pytest.approx(2 / (table.step_size[0] * 10), rel=1e-4)
    assert table.ratio[0] == pytest.approx(table.fourth[0] / table.known[0], rel=1e-4)
