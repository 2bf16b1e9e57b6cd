"""What the diagnostics of an estimate find and miss: chains made up, with a drift or without.

A chain is 1 + a straight line + noise, an AR(1) process of known correlation, so its mean is 1, the line's change
over the trace is a share of the estimate, and the draws are worth (1 - correlation)/(1 + correlation) of their
number. A flag without any drift is a false alarm.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run
from curvlab.sampling import LLC

_FLAGS = {"drift_flagged": "the loss still moves", "unmixed": "the chains have not mixed", "few": "too few draws"}


def power_table(run: Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row for each length, correlation and drift: shares of the repeats that are flagged.

    Columns: num_chains, num_draws, correlation, worth (effective draws), drift (over the trace, of the estimate);
    drift_flagged, unmixed, few: the shares with that problem; usable: without any; strictly_mixed: within the
    limits of Vehtari et al. (2021).

    Args:
        run: seeds, store.
        cfg: num_repeats, num_chains, relative_sd (of a draw), and the lists num_draws, correlations and drifts.
    """
    rows = []
    for num_draws, correlation, drift in product(cfg.num_draws, cfg.correlations, cfg.drifts):
        cell = {"num_chains": cfg.num_chains, "num_draws": num_draws, "correlation": correlation}
        sizes = {"num_repeats": cfg.num_repeats, "relative_sd": cfg.relative_sd}
        key = cell | {"drift": drift} | sizes
        generator = run.generator("llc_power", str(num_draws), str(correlation))  # equal noise for every drift
        shares = run.unit("benchmarks/llc_power", key, partial(_shares, **key, generator=generator), version=1)
        worth = cfg.num_chains * num_draws * (1 - correlation) / (1 + correlation)
        rows.append(cell | {"worth": worth, "drift": drift} | shares)
    return pd.DataFrame(rows)


def _shares(*, drift: float, num_repeats: int, relative_sd: float, **noise: Any) -> dict[str, Any]:
    chains = 1 + relative_sd * autoregressive(num_repeats, **noise)
    chains += drift * torch.linspace(-0.5, 0.5, chains.shape[-1], dtype=torch.float64)
    settings: dict[str, Any] = {"initial_loss": 0.0, "nbeta": 1.0, "step_size": 1.0, "localization": 0.0}
    settings |= {"num_examples": 1, "num_gradients": 0}
    found = [LLC.of_traces(draws, draws[:, :0], **settings) for draws in chains]
    shares = {
        name: sum(any(problem.startswith(text) for problem in llc.problems) for llc in found) / num_repeats
        for name, text in _FLAGS.items()
    }
    shares["usable"] = sum(llc.valid for llc in found) / num_repeats
    return shares | {"strictly_mixed": sum(llc.strictly_mixed for llc in found) / num_repeats}


def autoregressive(
    num_repeats: int, *, num_chains: int, num_draws: int, correlation: float, generator: torch.Generator
) -> Tensor:
    """Return (num_repeats, num_chains, num_draws) of stationary AR(1) processes of variance 1."""
    draws = torch.randn(num_repeats, num_chains, num_draws, generator=generator, dtype=torch.float64)
    for step in range(1, num_draws):
        draws[..., step] *= math.sqrt(1 - correlation**2)
        draws[..., step] += correlation * draws[..., step - 1]
    return draws
