"""The FLOPs and memory columns of Table 1, and how cost grows with P and τ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from curvlab.lab import ClaimResult, ClaimSheet, Computed, exact, out_of_reach, t_interval
from curvlab.lab import judge as verdict
from experiments.ginger.cost.scaling import exponent

RANK = 4  # of the claims on Table 1


def judge_cost(computed: Computed, claims: ClaimSheet) -> Iterator[ClaimResult]:
    """Judge what is counted, then what is measured."""
    yield from _counted(computed["flops"], claims)
    yield from _steps(computed["steps"], claims)
    yield from _scaling(computed, claims)


def _counted(flops: pd.DataFrame, claims: ClaimSheet) -> Iterator[ClaimResult]:
    small, large = flops[flops.network == "ResNet-18"], flops[flops.network == "ResNet-50"]
    ginger = small[(small.optimizer == "Ginger") & (small["rank"] == RANK)].set_index("forward")
    momentum = small[small.optimizer == "momentum"].iloc[0]
    of_large = large[large.optimizer == "momentum"].iloc[0]
    for name, way in (("flops-to-adam", "shared"), ("flops-own-forward", "own")):
        why = (
            "A backward pass has twice the products of a forward pass: two gradients from one forward pass make "
            "5/3, from two of them 2; the optimizer's own products are "
            f"{100 * ginger.own_flops[way] / momentum.flops:.2f} % of a gradient's."
        )
        value = ginger.to_adam[way]
        claim = claims.claim(name, paper=ginger.paper_to_adam[way])
        yield verdict(claim, value, exact(value, kind="counted"), if_not_reproduced=why)
    per_example = momentum.flops / momentum.batch_size
    value = momentum.flops / momentum.paper_flops
    yield verdict(
        claims.claim("flops-per-step", paper=momentum.paper_flops),
        value,
        exact(value, kind="counted"),
        if_not_reproduced=(
            f"One example's gradient alone has {per_example:.3g}. What JAX's profiler counts on a GPU leaves out "
            "(as we infer) the calls of cuDNN and cuBLAS, so that elementwise operations are what is left: see "
            "flops-of-networks."
        ),
    )
    growth = of_large.flops / momentum.flops
    activations = of_large.activations / momentum.activations
    yield verdict(
        claims.claim("flops-of-networks", paper=of_large.paper_flops / momentum.paper_flops),
        growth,
        exact(growth, kind="counted"),
        if_not_reproduced=(
            f"Entries of activations grow by {activations:.2f}, parameters by "
            f"{of_large.num_parameters / momentum.num_parameters:.2f}: the paper's column follows the "
            "activations, on which elementwise operations work."
        ),
    )
    own = small[(small.optimizer == "Ginger") & (small.forward == "shared") & (small["rank"] >= RANK)]
    slope = exponent(own["rank"], own.own_flops)
    yield verdict(
        claims.claim("flops-linear-in-rank"),
        slope,
        exact(slope, kind=f"counted, τ = {RANK} to {own['rank'].max():g}"),
        if_not_reproduced=(
            "A reflection that takes what is dropped to the last row costs O(Pτ), and so does what is measured of "
            "the basis in one of max(τ, 8) updates."
        ),
    )
    share = ginger.own_flops["shared"] / momentum.flops
    yield verdict(
        claims.claim("little-beside-the-gradient"),
        share,
        exact(share, kind="counted"),
        if_not_reproduced="Small batches of large networks make it more.",
    )


def _steps(steps: pd.DataFrame, claims: ClaimSheet) -> Iterator[ClaimResult]:
    for network in steps.network.unique():
        own = steps[steps.network == network]
        ginger = own[(own.optimizer == "Ginger") & (own["rank"] == RANK)]
        shared, apart = ginger[ginger.forward == "shared"], ginger[ginger.forward == "own"]
        memory = float(shared.memory_to_adam.iloc[0])
        size = f"{shared.num_parameters.iloc[0] * 4 / 1e6:.3g} MB of parameters, batch of {own.batch_size.iloc[0]}"
        yield verdict(
            claims.claim("memory-to-adam", of=network),
            memory,
            exact(memory, kind="allocations counted"),
            if_not_reproduced=f"The share of vectors beside activations depends on both: {size}.",
        )
        claim = claims.claim("seconds-to-adam", of=network)
        values = shared.seconds_to_adam.to_numpy()
        why = (
            f"With a forward pass of its own {apart.seconds_to_adam.mean():.2f}; counted products "
            f"{shared.flops_to_adam.iloc[0]:.2f} and {apart.flops_to_adam.iloc[0]:.2f} ({size})."
        )
        yield verdict(claim, values.mean(), t_interval(values, unit="repeats"), if_not_reproduced=why)
        elapsed = float(shared.wall_to_adam.iloc[0])
        threads = int(own.threads.iloc[0])
        kind = f"least of {len(values)} repeats, {threads} thread{'s' if threads > 1 else ''}"
        claim = claims.claim("elapsed-to-adam", of=network)
        yield verdict(claim, elapsed, exact(elapsed, kind=kind), if_not_reproduced=why)


def _scaling(computed: Computed, claims: ClaimSheet) -> Iterator[ClaimResult]:
    scaling, fits, flops = computed["scaling"], computed["fits"], computed["flops"]
    ginger = scaling[scaling.optimizer == "Ginger"]
    by_size, by_rank = (ginger[ginger.sweep == sweep] for sweep in ("size", "rank"))
    fitted = fits[(fits.optimizer == "Ginger") & (fits.degree == 1)]
    lines = {
        (sweep, quantity): own for (sweep, quantity), own in fitted.groupby(["sweep", "quantity"], sort=False)
    }
    size = float(by_rank.num_parameters.iloc[0])
    slope = lines["rank", "peak_bytes"].linear.iloc[0] / (4 * size)
    printed = flops[(flops.network == "ResNet-18") & (flops.optimizer == "Ginger")].dropna(subset="paper_memory")
    paper = np.polyfit(printed["rank"], 1e9 * printed.paper_memory / (4 * printed.num_parameters.iloc[0]), 1)[0]
    yield verdict(
        claims.claim("memory-per-rank", paper=paper),
        slope,
        exact(slope, kind="allocations counted"),
        if_not_reproduced="Another temporary that grows with τ.",
    )
    low, high_size = float(by_size.num_parameters.min()), float(by_size.num_parameters.max())
    values = lines["size", "milliseconds"].r_squared.to_numpy()
    yield verdict(
        claims.claim("time-linear-in-parameters", low=low, high=high_size, rank=int(by_size["rank"].iloc[0])),
        values.mean(),
        t_interval(values, unit="repeats"),
        if_not_reproduced="Small vectors stay in the cache, and take less time for each number.",
    )
    memory = lines["size", "peak_bytes"].r_squared.iloc[0]
    yield verdict(
        claims.claim("memory-linear-in-parameters"),
        memory,
        exact(memory, kind="allocations counted"),
        if_not_reproduced="A temporary that does not grow with P.",
    )
    high = by_rank[by_rank["rank"] >= RANK]
    claim = claims.claim("time-in-rank", high=f"{high['rank'].max():g}", size=size)
    if high["rank"].nunique() < 2:
        yield out_of_reach(claim, f"One rank above {RANK} gives no exponent: set scaling.ranks.")
        return
    slopes = np.array([exponent(own["rank"], own.milliseconds) for _, own in high.groupby("repeat")])
    yield verdict(
        claim,
        slopes.mean(),
        t_interval(slopes, unit="repeats"),
        if_not_reproduced="See flops-linear-in-rank for what is counted.",
    )
