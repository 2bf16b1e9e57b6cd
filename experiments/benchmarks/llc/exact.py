"""Deep linear networks beside their exact values at this n, temperature and localization.

y = W_L ... W_1 x with all layers of one width d, at the most singular parameter of a true map of rank r: every W
is diag(1, ..., 1, 0, ..., 0). The labels are the network's own, so that this is the minimum exactly. The density
exp(-nbeta L(w) - localization/2 |w - w0|²), whose mean loss an estimate is of, is sampled exactly, without a step
size: each layer given the others is Gaussian (`gibbs_values`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from scipy import stats
from torch import Tensor, nn

from curvlab.lab import Computed, Run, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import Interval, exact
from curvlab.sampling import SettingsWarning, choose_sgld_settings, default_nbeta, estimate_llc
from curvlab.sampling.pilots import Sampler
from experiments.shared.stats import mean

AT_START = "SGLD, step set at the start"
UNSTABLE = "the step is too large where the chains are"
CHAINS = ("num_chains", "batch_size", "num_burnin_steps", "num_draws")
SIZES = ("num_layers", "width", "rank")
NAMES = {"sgld": "SGLD", "averaged": "averaged noises", "underdamped": "underdamped"}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the estimates of each network and sampler beside exact values, and averaged noises beside SGLD."""
    cfg = cfg.exact
    shared = {name: cfg[name] for name in ("num_examples", *CHAINS)}
    rows, noises = [], []
    for layers in run.progress(list(cfg.networks), "networks"):
        network = dict(zip(SIZES, layers, strict=True))
        for name in cfg.samplers:
            found = chosen_estimate(run, **network, **shared, sampler=name)
            rows.append(_row(run, cfg, network, NAMES[name], found))
        found = fixed_estimate(run, **network, **shared, **cfg.at_start, friction=None)
        rows.append(_row(run, cfg, network, AT_START, found))
    frictions, fixed = {"sgld": None, "averaged": math.inf}, {"localization": cfg.noises.localization}
    for layers, stability, name in product(cfg.noises.networks, cfg.noises.stabilities, frictions):
        network = dict(zip(SIZES, layers, strict=True))
        fixed |= {"stability": stability, "friction": frictions[name]}
        row = _row(run, cfg, network, NAMES[name], fixed_estimate(run, **network, **shared, **fixed))
        noises.append({"stability_at_start": stability} | row)
    return {"exact": pd.DataFrame(rows), "exact_noises": pd.DataFrame(noises)}


def _row(
    run: Run, cfg: DictConfig, network: dict[str, int], sampler: str, found: dict[str, Any]
) -> dict[str, Any]:
    num_layers, width, rank = network.values()
    settings = {"num_examples": cfg.num_examples, "localization": found["localization"]}
    truth = exact_value(run, **network, **settings, **cfg.gibbs)
    known = coefficient([width] * (num_layers + 1), rank)
    row = {"network": f"{num_layers}-layers-{width}-rank-{rank}", "parameters": num_layers * width**2}
    row |= {"n": cfg.num_examples, "sampler": sampler, **found, **truth, "asymptote": known}
    return row | {"ratio": found["estimate"] / truth["exact"], "exact_to_asymptote": truth["exact"] / known}


@unit("benchmarks/llc_exact/chosen", version=1, about="{sampler} on {num_layers} linear layers of width {width}")
def chosen_estimate(
    run: Run, /, *, sampler: Sampler, num_burnin_steps: int, num_draws: int, **key: Any
) -> dict[str, Any]:
    """Return the estimate at what `choose_sgld_settings` finds."""
    model, data = _singular(run, key)
    batches = {"batch_size": key["batch_size"], "num_burnin_steps": num_burnin_steps}
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingsWarning)  # it is among the problems
        seed = run.generator("llc_exact pilots", sampler, key["num_layers"], key["width"])
        chosen = choose_sgld_settings(model, half_square, data, **batches, sampler=sampler, generator=seed)
    seed = run.generator("llc_exact chains", sampler, key["num_layers"], key["width"])
    settings = {"num_chains": key["num_chains"], "num_draws": num_draws, "settings": chosen, "generator": seed}
    llc = estimate_llc(model, half_square, data, **batches, **settings)
    return _found(llc, chosen.friction, began)


@unit("benchmarks/llc_exact/fixed", version=1, about="{num_layers} layers of width {width} at one step size")
def fixed_estimate(
    run: Run, /, *, stability: float, localization: float, friction: float | None, **key: Any
) -> dict[str, Any]:
    """Return the estimate at the step size of this stability at the start, where λmax is the number of layers."""
    model, data = _singular(run, key)
    began, chains = time.process_time(), {name: key[name] for name in CHAINS}
    step_size = 4 * stability / (default_nbeta(key["num_examples"]) * key["num_layers"] + localization)
    settings = {"step_size": step_size, "localization": localization, "friction": friction}
    seed = run.generator("llc_exact fixed", key["num_layers"], key["width"], str(stability))
    llc = estimate_llc(model, half_square, data, **chains, **settings, generator=seed)
    return _found(llc, friction, began)


def _found(llc: Any, friction: float | None, began: float) -> dict[str, Any]:
    low, high = llc.interval()
    names = ("nbeta", "step_size", "localization", "curvature_cutoff", "rhat", "ess", "stability")
    row: dict[str, Any] = {name: float(getattr(llc, name)) for name in (*names, "top_eigenvalue")}
    row |= {"friction": friction, "estimate": llc.value, "low": float(low), "high": float(high)}
    problem = "; ".join(text.split(":")[0] for text in llc.problems)
    return row | {"problem": problem, "cpu_seconds": time.process_time() - began}


@unit("benchmarks/llc_exact/gibbs", version=1, about="exact value of {num_layers} linear layers of width {width}")
def exact_value(
    run: Run, /, *, num_chains: int, num_sweeps: int, localization: float, **key: Any
) -> dict[str, float]:
    """Return the exact value with its standard error, over independent Gibbs chains without their first fifth."""
    model, (inputs, _) = _singular(run, key)
    layers = [parameter.detach().cpu().double() for parameter in model.parameters()]
    moments = (inputs.double().T @ inputs.double() / len(inputs)).cpu()
    generator = run.generator("llc_exact gibbs", key["num_layers"], key["width"], str(localization))
    nbeta = default_nbeta(key["num_examples"])
    settings: dict[str, Any] = {"nbeta": nbeta, "localization": localization, "num_sweeps": num_sweeps}
    chains = [
        gibbs_values(layers, moments, **settings, generator=generator)[num_sweeps // 5 :].mean()
        for _ in range(num_chains)
    ]
    means = torch.stack(chains)
    return {"exact": float(means.mean()), "exact_stderr": float(means.std()) / math.sqrt(num_chains)}


# --------------------------------------------------------------------------------------- the networks
def _singular(run: Run, key: dict[str, Any]) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    model = singular_network(key["num_layers"], key["width"], key["rank"]).to(run.device)
    inputs = torch.randn(
        key["num_examples"], key["width"], generator=run.generator("linear inputs", str(key["width"]))
    ).to(run.device)
    with torch.no_grad():
        return model, (inputs, model(inputs))


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


def gibbs_values(
    start: Sequence[Tensor],
    moments: Tensor,
    *,
    nbeta: float,
    localization: float,
    num_sweeps: int,
    generator: torch.Generator,
) -> Tensor:
    """Return nbeta L(W) after each sweep over the layers, (num_sweeps,), drawn from the exact density.

    L(W) = 1/2 tr[(W_L ... W_1 - T) S (W_L ... W_1 - T)ᵀ], T the product of `start`, S the mean of x xᵀ. With
    A = W_L ... W_{i+1} and B Bᵀ = W_{i-1} ... W_1 S (W_{i-1} ... W_1)ᵀ the density of W_i given the others is
    Gaussian: its precision is nbeta AᵀA ⊗ BBᵀ + localization, diagonal in the eigenvectors of the two, and
    precision × mean = nbeta Aᵀ T S (W_{i-1} ... W_1)ᵀ + localization start_i. No step size, no rejections.

    Args:
        start: w0, from W_1 to W_L; where the chain begins, and what the localization pulls to.
        moments: S, positive definite.
        nbeta: inverse temperature times number of examples.
        localization: γ, above 0.
        num_sweeps: each layer once, in random order.
        generator: the only source of randomness.

    Cost of a sweep: L pairs of eigendecompositions d x d, and L² products.
    """
    layers, root = [layer.clone() for layer in start], torch.linalg.cholesky(moments)
    target = _product(start, torch.eye(len(moments)).to(moments)) @ root
    values = []
    for _ in range(num_sweeps):
        for i in torch.randperm(len(layers), generator=generator).tolist():
            below = _product(layers[:i], root)
            above = _product(layers[i + 1 :], torch.eye(layers[i].shape[0]).to(root))
            left, left_vectors = torch.linalg.eigh(above.T @ above)
            right, right_vectors = torch.linalg.eigh(below @ below.T)
            precision = nbeta * torch.outer(left.clamp(min=0), right.clamp(min=0)) + localization
            linear = nbeta * above.T @ target @ below.T + localization * start[i]
            noise = torch.randn(layers[i].shape, generator=generator, dtype=root.dtype)
            drawn = left_vectors.T @ linear @ right_vectors / precision + noise / precision.sqrt()
            layers[i] = left_vectors @ drawn @ right_vectors.T
        values.append(0.5 * nbeta * (_product(layers, root) - target).square().sum())
    return torch.stack(values)


def _product(layers: Sequence[Tensor], first: Tensor) -> Tensor:
    for layer in layers:
        first = layer @ first
    return first


def coefficient(sizes: Sequence[int], rank: int) -> float:
    """Return the learning coefficient of a deep linear network, n to infinity (Aoyagi 2024, Theorem 1).

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


# ---------------------------------------------------------------------------------------------- claims
CLAIMS = ("exact-value", "unstable-step-refused", "asymptote", "asymptote-chosen", "averaged-noises")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the chosen samplers, the unstable step, the asymptote, and averaged noises against SGLD."""
    table = computed["exact"].fillna({"problem": ""})
    results = []
    for _, row in table.iterrows():
        of = f"{row.network}-{row.sampler}".lower().replace(",", "").replace(" ", "-")
        if row.sampler == AT_START:
            results.append(_refused(claims.claim("unstable-step-refused", of=row.network), row))
            why = f"nbeta is {row.nbeta:.4g}, the localization {row.localization:.3g}."
            results.append(_asymptote(claims.claim("asymptote", of=row.network), computed, row, why))
        else:
            results.append(_right(claims.claim("exact-value", of=of), row, _t(computed)[1]))
    chosen = table[table.sampler != AT_START].sort_values("exact_to_asymptote")
    listed = [f"{row.exact_to_asymptote:.2f} at {row.localization:.3g}" for row in chosen.itertuples()]
    why = f"By localization: {', '.join(listed)}."
    results.append(_asymptote(claims.claim("asymptote-chosen"), computed, chosen.iloc[0], why))
    return [*results, _averaged(claims.claim("averaged-noises"), computed["exact_noises"])]


def _asymptote(claim: Claim, computed: Computed, row: pd.Series, why: str) -> ClaimResult:
    num_chains, quantile = _t(computed)
    error, value = quantile * row.exact_stderr / row.asymptote, row.exact_to_asymptote
    interval = Interval(value - error, value + error, "t 95 %, Gibbs chains", num_chains)
    return judge_claim(claim, float(row.exact_to_asymptote), interval, if_not_reproduced=why)


def _t(computed: Computed) -> tuple[int, float]:
    """Return the number of Gibbs chains, and the quantile of a 95 % interval of their mean."""
    num_chains = int(computed.config["exact"]["gibbs"]["num_chains"])
    return num_chains, float(stats.t.ppf(0.975, num_chains - 1))


def _right(claim: Claim, row: pd.Series, quantile: float) -> ClaimResult:
    # The errors of the sampler's chains and of the exact value, each by t over its chains.
    exact_half = quantile * row.ratio * row.exact_stderr / row.exact
    half = np.hypot((row.high - row.low) / 2 / row.exact, exact_half)
    said = f"{row.ratio:.3f} ({row.ratio - half:.3f} to {row.ratio + half:.3f})"
    if row.problem:
        return out_of_reach(claim, f"Refused: {row.problem}. The ratio is {said}.")
    why = f"Step size {row.step_size:.2g}, localization {row.localization:.3g}, stability {row.stability:.2g}."
    interval = Interval(float(row.ratio - half), float(row.ratio + half), "t 95 %, chains", 4)
    return judge_claim(claim, float(row.ratio), interval, if_not_reproduced=why)


def _refused(claim: Claim, row: pd.Series) -> ClaimResult:
    refused = float(UNSTABLE in row.problem or "diverged" in row.problem)
    why = f"The estimate is {row.ratio:.3g} of the exact value at a stability of {row.stability:.3g}."
    found = judge_claim(claim, refused, exact(refused, kind="deterministic, of one step"), if_not_reproduced=why)
    return replace(found, explanation=why)


def _averaged(claim: Claim, noises: pd.DataFrame) -> ClaimResult:
    errors = noises.assign(error=(noises.ratio - 1).abs())
    errors = errors.pivot_table(index=["network", "stability_at_start"], columns="sampler", values="error")
    excess = (errors[NAMES["averaged"]] - errors[NAMES["sgld"]]).to_numpy()
    why = "; ".join(f"{name}: {100 * errors[name].mean():.1f} % on average" for name in errors)
    return judge_claim(claim, *mean(excess, unit="settings"), if_not_reproduced=why)
