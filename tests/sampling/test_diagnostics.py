from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from curvlab.sampling import drift, effective_sample_size, split_rhat
from curvlab.sampling.diagnostics import problems_of


def autoregressive(correlation: float, num_chains: int = 6, length: int = 4000) -> Tensor:
    noise = torch.randn(num_chains, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = noise.clone()
    for step in range(1, length):
        draws[:, step] = correlation * draws[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
    return draws


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


@pytest.mark.parametrize("noise", [0.0, 0.5])  # share of the variance that is a batch's, new at each draw
def test_rhat_and_effective_number_say_the_same(noise: float) -> None:
    """R-hat² - 1 is near 2 C/S for 2 C half chains worth S draws, whatever makes them worth so many."""
    correlation, num_draws, repeats = 0.9, 250, 40
    worth = 4 * num_draws / (1 + 2 * (1 - noise) * correlation / (1 - correlation))
    slow = autoregressive(correlation, num_chains=4 * repeats, length=num_draws + 100)[:, 100:]
    fast = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chains = (math.sqrt(1 - noise) * slow + math.sqrt(noise) * fast).view(repeats, 4, num_draws)
    found = np.array([split_rhat(draws) for draws in chains])
    assert (found**2 - 1).mean() == pytest.approx(8 / worth, rel=0.2)
    estimated = np.median([effective_sample_size(draws, "bulk") for draws in chains])
    assert estimated == pytest.approx(worth, rel=0.2)


def test_chains_in_different_places_are_worth_little() -> None:
    assert effective_sample_size(autoregressive(0.0) + 5 * torch.arange(6.0)[:, None]) < 30


@pytest.mark.parametrize("draws", [torch.zeros(2, 3), torch.ones(2, 50), torch.full((2, 50), math.inf)])
def test_nothing_to_say(draws: Tensor) -> None:
    assert math.isnan(split_rhat(draws))
    assert math.isnan(effective_sample_size(draws))
    assert math.isnan(drift(draws).z)


@pytest.mark.parametrize(("worth", "enough"), [(39.0, False), (41.0, True)])
@pytest.mark.parametrize("kind", ["ess", "ess_tail"])
def test_each_chain_needs_ten_effective_draws(kind: str, worth: float, enough: bool) -> None:
    """Ten in all are too few for four chains, although their R-hat is small."""
    draws = 10 + autoregressive(0.0, num_chains=4, length=200)
    numbers = {"rhat": 1.05, "ess": 500.0, "ess_tail": 500.0, "stderr": 0.1} | {kind: worth}
    found = problems_of(draws, draws[:, :0], **numbers)
    assert [text.split(":")[0] for text in found] == (
        [] if enough else ["too few draws to see whether the chains have mixed"]
    )
