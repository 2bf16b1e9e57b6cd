"""Where an estimate of a deep linear network comes from: chains on the exact loss, by step size and localization.

With inputs of unit covariance the expected loss of W_L ... W_1 x is ½ ‖W_L ... W_1 - W*‖²_F, whose gradient is a
few products of the layers: no batches, no finite n but in nbeta. What is left of an estimate's difference to the
coefficient is then the step's size, the localization, and whether the chain has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.lab import runs
from curvlab.sampling import default_nbeta
from experiments.benchmarks.llc.linear_networks import coefficient, singular_network

QUARTERS = ("first", "second", "third", "fourth")
SETTINGS = ("case", "step", "localization", "num_steps", "nbeta", "step_size", "relaxation_steps")
COLUMNS = (*SETTINGS, *QUARTERS, "known", "ratio")


def population_table(run: runs.Run, cfg: DictConfig, linear: DictConfig) -> pd.DataFrame:
    """Return one row for each case: nbeta times the mean loss in each quarter of the chains.

    Args:
        run: seeds, store, device.
        cfg: `network` (num_layers, width, rank; null: none) and `cases`, by name: `step` in units of
            1/(nbeta λmax), `localization`, `num_steps`, and `nbeta_factor` before the nbeta of `linear`.
        linear: `num_examples`, which gives nbeta, and `num_chains`.

    Columns `COLUMNS`: relaxation_steps is 2 / (step_size localization), of a flat direction; first to fourth are
    the estimate in each quarter; ratio is that of the fourth to the known coefficient.
    """
    rows = []
    for name, case in cfg.cases.items() if cfg.network is not None else ():
        key: dict[str, Any] = OmegaConf.to_container(case, resolve=True)  # type: ignore[assignment]
        key |= {"network": list(cfg.network), "num_examples": linear.num_examples, "num_chains": linear.num_chains}
        about = f"chains on the exact loss, {name}"
        found = run.unit("benchmarks/llc_population", key, partial(_chains, run, key), version=1, about=about)
        known = coefficient([cfg.network[1]] * (cfg.network[0] + 1), cfg.network[2])
        row = {"case": name, "step": case.step, "localization": case.localization, "num_steps": case.num_steps}
        rows.append(row | found | {"known": known, "ratio": found[QUARTERS[-1]] / known})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _chains(run: runs.Run, case: Mapping[str, Any]) -> dict[str, float]:
    num_layers, width, rank = case["network"]
    nbeta = case["nbeta_factor"] * default_nbeta(case["num_examples"])
    step_size = case["step"] / (nbeta * num_layers)
    start = [weight.detach() for weight in singular_network(num_layers, width, rank).parameters()]
    losses = langevin_losses(
        start,
        num_chains=case["num_chains"],
        num_steps=case["num_steps"],
        step_size=step_size,
        nbeta=nbeta,
        localization=case["localization"],
        generator=run.generator("llc_population", str(num_layers), str(width)),
    )
    quarters = [float(part.mean()) * nbeta for part in losses.chunk(len(QUARTERS))]
    relaxation = 2 / (step_size * case["localization"])
    facts = {"nbeta": nbeta, "step_size": step_size, "relaxation_steps": relaxation}
    return facts | dict(zip(QUARTERS, quarters, strict=True))


def langevin_losses(
    start: list[Tensor],
    *,
    num_chains: int,
    num_steps: int,
    step_size: float,
    nbeta: float,
    localization: float,
    generator: torch.Generator,
) -> Tensor:
    """Return ½ ‖W_L ... W_1 - W*‖² along Langevin chains from `start`, (num_steps,), the mean over chains.

    w <- w - ε/2 (nbeta ∇L(w) + localization (w - start)) + sqrt(ε) N(0, I), as `SGLD` with the whole expectation
    for its batch. `start` is W_1 to W_L, square, and W* their product. Cost: 3 L products d x d a step.
    """
    layers = [layer.expand(num_chains, *layer.shape).clone() for layer in start]
    target = torch.linalg.multi_dot([*reversed(start)]) if len(start) > 1 else start[0]
    losses = torch.empty(num_steps)
    for step in range(num_steps):
        below = [torch.eye(len(target)).to(target).expand_as(layers[0])]  # W_{i-1} ... W_1
        for layer in layers:
            below.append(layer @ below[-1])
        residual = below.pop() - target
        losses[step] = 0.5 * residual.square().sum((1, 2)).mean()
        above = residual  # (W_L ... W_{i+1})ᵀ times the residual
        for place in reversed(range(len(layers))):
            layer = layers[place]
            drift = nbeta * (above @ below[place].mT) + localization * (layer - start[place])
            above = layer.mT @ above
            noise = torch.randn(layer.shape, generator=generator)
            layers[place] = layer - step_size / 2 * drift + math.sqrt(step_size) * noise
    return losses
