"""How much a test loss rises without the examples that are ranked most helpful to it, and without random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.influence import removal_weights
from curvlab.lab import bootstrap_interval
from experiments.benchmarks.attribution.network import Network, without_random, without_ranked

RANDOM = "random removal"


def column(fraction: float) -> str:
    """Return what the table calls the removal of this fraction."""
    return f"removal_{100 * fraction:g}"


def rises_when_ranked(network: Network, ranked: list[dict[str, Any]]) -> dict[float, Tensor]:
    """Return for each fraction how much each query's loss rises, (number of rankings, queries with removals).

    Args:
        network: that was scored.
        ranked: `scores` (M, N), and all that they depend on.
    """
    settings, num = network.settings, network.settings.num_removed_for
    pairs = [(entry, fraction) for entry in ranked for fraction in settings.fractions]
    removed = [[entry["method"], entry["damping"], entry["key"], fraction] for entry, fraction in pairs]
    weights = [removal_weights(entry["scores"][:num], fraction) for entry, fraction in pairs]
    key = {"num_queries": settings.num_queries, "removed": removed, "num": num}
    losses = without_ranked(network, _and_everything(weights), **key)["losses"]
    rises = (losses[1:].view(len(removed), num, -1) - losses[0])[:, torch.arange(num), torch.arange(num)]
    return {fraction: rises[i :: len(settings.fractions)] for i, fraction in enumerate(settings.fractions)}


def rises_at_random(network: Network) -> dict[float, Tensor]:
    """Return the same without as many examples drawn at random, (draws, queries with removals).

    One draw serves all queries: who is left out does not depend on them.
    """
    settings, num = network.settings, network.settings.num_removed_for
    draws, generator = settings.num_random_removals, network.generator("random removals")
    weights = [
        removal_weights(torch.rand(draws, network.num_train, generator=generator, dtype=torch.float64), fraction)
        for fraction in settings.fractions
    ]
    key = {"num_queries": settings.num_queries, "fractions": list(settings.fractions), "draws": draws}
    losses = without_random(network, _and_everything(weights), **key)["losses"]
    rises = (losses[1:] - losses[0])[:, :num].view(len(weights), draws, num)
    return dict(zip(settings.fractions, rises, strict=True))


def _and_everything(weights: list[Tensor]) -> Tensor:
    """Return the rows of weights below one of training on everything."""
    rows = torch.cat(weights).double()
    return torch.cat([torch.ones_like(rows[:1]), rows])


def ranked_columns(rises: dict[float, Tensor], index: int) -> dict[str, float]:
    """Return mean and 95 % interval over queries of one ranking, for each fraction."""
    found: dict[str, float] = {}
    for fraction, each in rises.items():
        values = each[index].double().cpu().numpy()
        generator = np.random.default_rng(0)
        interval = bootstrap_interval(values, np.mean, generator=generator)
        found |= _named(fraction, float(values.mean()), interval.low, interval.high)
    return found


def random_columns(rises: dict[float, Tensor], num_resamples: int = 2000) -> dict[str, float]:
    """Return the same of the random removals; the bootstrap draws both the removals and the queries anew."""
    found: dict[str, float] = {}
    for fraction, each in rises.items():
        values, generator = each.double().cpu().numpy(), np.random.default_rng(0)
        rows, queries = (generator.integers(size, size=(num_resamples, size)) for size in values.shape)
        means = values[rows[:, :, None], queries[:, None, :]].mean((1, 2))
        low, high = np.quantile(means, [0.025, 0.975])
        found |= _named(fraction, float(values.mean()), float(low), float(high))
    return found


def _named(fraction: float, mean: float, low: float, high: float) -> dict[str, float]:
    name = column(fraction)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
