"""Estimates in the regime of use, with known answers: deep linear networks, four chains, SGLD and RMSProp.

y = W_L ... W_1 x with all layers of one width d, at the most singular parameter of a true map of rank r: every W
is diag(1, ..., 1, 0, ..., 0). The labels are the network's own, without noise, so that this is the minimum
exactly, and nothing but the sampler is judged. Aoyagi (2024) has the coefficient as n goes to infinity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.lab import runs
from curvlab.sampling import RMSProp, default_nbeta, estimate_llc


def linear_network_table(run: runs.Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row for each network and sampler: estimate with interval over chains, coefficient, their ratio.

    Args:
        run: seeds, store, device.
        cfg: `networks` (lists of num_layers, width, rank), `num_examples`, `num_chains`, `num_draws`,
            `num_burnin_steps`, `batch_size`, `localization`, and `samplers` by name: `step`, the step size in
            units of 1/(nbeta λmax), λmax = num_layers; `damping` of `RMSProp`, null: plain SGLD.
    """
    shared: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    networks, samplers = shared.pop("networks"), shared.pop("samplers")
    rows = []
    for num_layers, width, rank in networks:
        for name, sampler in samplers.items():
            key = shared | sampler | {"num_layers": num_layers, "width": width, "rank": rank}
            compute = partial(_estimate, run, **key)
            about = f"LLC of {num_layers} linear layers of width {width} by {name}"
            found = run.unit("benchmarks/llc_linear", key, compute, version=1, about=about)
            known = coefficient([width] * (num_layers + 1), rank)
            row = {"network": f"{num_layers}-layers-{width}-rank-{rank}", "parameters": num_layers * width**2}
            row |= {"n": cfg.num_examples, "sampler": name, **found, "known": known}
            rows.append(row | {"ratio": found["estimate"] / known})
    return pd.DataFrame(rows)


def _estimate(
    run: runs.Run,
    *,
    num_layers: int,
    width: int,
    rank: int,
    num_examples: int,
    step: float,
    damping: float | None,
    **settings: Any,
) -> dict[str, Any]:
    model = singular_network(num_layers, width, rank).to(run.device)
    inputs = torch.randn(num_examples, width, generator=run.generator("linear inputs", str(width)))
    inputs = inputs.to(run.device)
    with torch.no_grad():
        targets = model(inputs)
    nbeta = default_nbeta(num_examples)
    start = time.process_time()
    llc = estimate_llc(
        model,
        half_square,
        (inputs, targets),
        step_size=step / (nbeta * num_layers),
        nbeta=nbeta,
        preconditioner=None if damping is None else RMSProp(damping=damping),
        generator=run.generator("llc_linear", str(num_layers), str(width), str(rank)),
        **settings,
    )
    low, high = llc.interval()
    problem = "; ".join(text.split(":")[0] for text in llc.problems)
    return {
        "nbeta": nbeta,
        "curvature_cutoff": llc.curvature_cutoff,
        "step_size": llc.step_size,
        "estimate": llc.value,
        "low": float(low),
        "high": float(high),
        "rhat": llc.rhat,
        "ess": llc.ess,
        "problem": problem,
        "cpu_seconds": time.process_time() - start,
    }


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared distance, mean over examples: -ln p of unit variance, but for a constant."""
    return 0.5 * (outputs - targets).square().sum(-1).mean()


def singular_network(num_layers: int, width: int, rank: int) -> nn.Sequential:
    """Return layers without bias, each diag(1, ..., 1, 0, ..., 0) with `rank` ones."""
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.diag((torch.arange(width) < rank).float()))  # type: ignore[operator]
    return layers


def coefficient(sizes: Sequence[int], rank: int) -> float:
    """Return the learning coefficient of a deep linear network (Aoyagi 2024, Theorem 1).

    For widths H_1, ..., H_{L+1}, with excesses Δ_i = H_i - r, take the set Σ of the smallest of them, l + 1 in
    number, for which max Δ_Σ < min of the others, sum Δ_Σ >= l max Δ_Σ and sum Δ_Σ < l min of the others. With
    M = ceil(sum Δ_Σ / l) and a = sum Δ_Σ - (M - 1) l

        λ = [r (H_1 + H_{L+1}) - r²]/2 + a (l - a)/(4 l) - l (l - 1)/4 (sum Δ_Σ / l)² + 1/2 sum_{i<j} Δ_i Δ_j.

    Args:
        sizes: of the inputs, the hidden layers, and the outputs.
        rank: r, of the true map.
    """
    if len(sizes) < 2 or not 0 <= rank <= min(sizes):
        raise ValueError(f"a map of rank {rank} needs two sizes or more, none below the rank; got {list(sizes)}")
    excess = sorted(size - rank for size in sizes)
    for count in range(2, len(excess) + 1):
        chosen, others = excess[:count], excess[count:]
        l, total = count - 1, sum(chosen)  # noqa: E741  # the theorem's letter
        least = min(others, default=math.inf)
        if chosen[-1] < least and total >= l * chosen[-1] and total < l * least:
            a = total - (math.ceil(total / l) - 1) * l
            pairs = (total**2 - sum(value**2 for value in chosen)) / 2
            regular = (rank * (sizes[0] + sizes[-1]) - rank**2) / 2
            return regular + a * (l - a) / (4 * l) - l * (l - 1) / 4 * (total / l) ** 2 + pairs / 2
    raise ValueError(f"no set of sizes fulfils the theorem's conditions: {list(sizes)}, rank {rank}")
