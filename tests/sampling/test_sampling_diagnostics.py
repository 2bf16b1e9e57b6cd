from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from curvlab.sampling import effective_sample_size, split_rhat


def autoregressive(correlation: float, num_chains: int = 6, length: int = 4000) -> Tensor:
    noise = torch.randn(num_chains, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = noise.clone()
    for step in range(1, length):
        draws[:, step] = correlation * draws[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
    return draws


def test_rhat_by_hand() -> None:
    draws = torch.tensor([[1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 7.0, 4.0]])
    halves = [[1.0, 2.0], [0.0, 1.0], [3.0, 5.0], [7.0, 4.0]]
    means = [sum(half) / 2 for half in halves]
    within = sum((a - b) ** 2 / 2 for a, b in halves) / 4
    grand = sum(means) / 4
    between = sum((mean - grand) ** 2 for mean in means) / 3
    assert split_rhat(draws) == pytest.approx(math.sqrt((within / 2 + between) / within))


def test_rhat_sees_shifts_and_trends() -> None:
    draws = autoregressive(0.0)
    assert split_rhat(draws) == pytest.approx(1.0, abs=2e-3)
    assert split_rhat(draws + torch.arange(6.0)[:, None]) > 1.5
    assert split_rhat(draws + torch.linspace(0, 4, 4000)) > 1.2


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, -0.4])
def test_effective_sample_size_of_autoregressive_chains(correlation: float) -> None:
    expected = 6 * 20_000 * (1 - correlation) / (1 + correlation)
    assert effective_sample_size(autoregressive(correlation, length=20_000)) == pytest.approx(expected, rel=0.15)


def test_chains_in_different_places_are_worth_little() -> None:
    assert effective_sample_size(autoregressive(0.0) + 5 * torch.arange(6.0)[:, None]) < 30


@pytest.mark.parametrize("draws", [torch.zeros(2, 3), torch.ones(2, 50), torch.full((2, 50), math.inf)])
def test_nothing_to_say(draws: Tensor) -> None:
    assert math.isnan(split_rhat(draws))
    assert math.isnan(effective_sample_size(draws))
