"""What the paper says of both optimizers' accuracy, of convergence and of cost, where claims.yaml alone cannot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, t_interval
from curvlab.lab import judge as verdict
from curvlab.lab.claims.claims import OUT_OF_REACH
from experiments.shared import stats

RANK = 4  # of the claims on Table 1


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims that have no `value` in the sheet."""
    return [
        *_approximation(computed["table"], claims),
        *_misprints(computed["exact"], claims),
        _precision(computed["precision"], claims),
        *_convergence(computed["convergence"], claims),
        *_counted(computed["flops"], claims),
        *_scaling(computed, claims),
    ]


# ------------------------------------------------------------------------------------ approximation
def _approximation(table: pd.DataFrame, claims: ClaimSheet) -> Iterator[ClaimResult]:
    common = table[table.target == "common"]
    for (task, decay), own in common.groupby(["task", "decay"], sort=False):
        of = f"{task}-decay-{decay:g}"
        for name, error, other, why in (
            (
                "closer-inverse",
                "inverse_error",
                "QNG",
                "The error of the inverse is that of the smallest eigenvalues.",
            ),
            (
                "closer-direction",
                "direction_error",
                "QNG",
                "Where both keep one or two vectors, most of the moving average is missing from both.",
            ),
            (
                "optimal",
                "matrix_error",
                "best",
                "Each cut is optimal given the state before it (see cut-optimal); what was cut is lost for what "
                "comes after, so the sum is not.",
            ),
        ):
            yield _ratio(claims.claim(name, of=of), own, error, other, why)
        yield from _own_targets(table[(table.task == task) & (table.decay == decay)], claims, of)


def _own_targets(table: pd.DataFrame, claims: ClaimSheet, of: str) -> Iterator[ClaimResult]:
    own = table[table.target == "own"]
    ginger = own[(own.optimizer == "Ginger") & (own["rank"] == own["rank"].max())]
    smallest = ginger.damping.astype(float).min()
    values = ginger[ginger.damping.astype(float) == smallest].inverse_error.to_numpy()
    errors = ginger.groupby("damping", sort=False).inverse_error.mean()
    by_damping = ", ".join(f"{value:.3f} at γ = {damping}" for damping, value in errors.items())
    yield verdict(
        claims.claim("own-target", of=of, damping=f"{smallest:g}"),
        values.mean(),
        t_interval(values),
        if_not_reproduced=(
            "Its relative error is σ/(γ + σ) of the largest σ that was cut, 1 as long as that is far above γ. By "
            f"damping: {by_damping}."
        ),
    )
    tables = {
        error: own[own.optimizer == "QNG"].pivot_table(index="seed", columns="rank", values=f"{error}_error")
        for error in ("matrix", "inverse")
    }
    rank = tables["matrix"].mean().idxmin()
    best = tables["matrix"][rank].to_numpy()
    yield verdict(
        claims.claim("own-target-qng", of=of),
        best.mean(),
        t_interval(best),
        if_not_reproduced=(
            f"At τ = {rank}. Its inverse is off by {tables['inverse'][rank].mean():.2f}, as its identity stays at "
            "α^τ where that of the target goes to zero as α^t."
        ),
    )


def _ratio(claim: Claim, table: pd.DataFrame, error: str, other: str, why: str) -> ClaimResult:
    """Judge the error of Ginger over another's, at the rank with the largest mean over seeds."""
    errors = table.pivot_table(index=["rank", "seed"], columns="optimizer", values=error)
    ratios = (errors["Ginger"] / errors[other]).unstack("rank")
    means = ratios.mean()
    rank = means.idxmax()
    all_ranks = ", ".join(f"{value:.2f} at τ = {place}" for place, value in means.items())
    values = ratios[rank].to_numpy()
    return verdict(claim, values.mean(), t_interval(values), if_not_reproduced=f"{why} By rank: {all_ranks}.")


# ------------------------------------------------------------------------------------ exact statements
CONVERTED = (
    "The text at hand was converted by a machine, and a root whose bar ends too early is the commonest error of "
    "such conversions: the paper's own pages decide. As converted the root covers too little, and β_t reduces to "
    "1 - α, whatever q"
)


def _misprints(table: pd.DataFrame, claims: ClaimSheet) -> Iterator[ClaimResult]:
    printed, betas = (table[table.statement == name] for name in ("algorithm-1", "printed-beta"))
    worst = printed.iloc[int(printed.value.to_numpy().argmax())]
    why = (
        "h is that of ασ and γ, but K is that of σ and γ/α and lacks α⁻¹: the α-factors do not fit each other. "
        f"With h of σ and γ/α and with α⁻¹K, as in Eq. 17, the error is rounding. {_after_updates(printed)}"
    )
    kind = f"largest of {len(printed)}: {worst.stream}, {worst.updates} updates"
    yield verdict(claims.claim("algorithm-1"), worst.value, exact(worst.value, kind=kind), if_not_reproduced=why)
    worst, first = betas.iloc[int(betas.value.to_numpy().argmax())], betas.iloc[0]
    why = (
        f"{CONVERTED}: off by {first.value:.3g} for the first gradient of {first.stream}. With "
        "(√(α + (1-α)‖q‖²) - √α)/‖q‖² it holds."
    )
    interval = exact(worst.value, kind=f"largest of {len(betas)}: {worst.stream}")
    yield ClaimResult(claims.claim("printed-beta"), float(worst.value), interval, OUT_OF_REACH, why)


def _after_updates(printed: pd.DataFrame) -> str:
    """Say how wrong the printed algorithm is after the first and the last update, on each stream."""
    found = []
    for (stream, decay), own in printed.groupby(["stream", "decay"], sort=False):
        damping = np.sort(own.damping.unique())[len(own.damping.unique()) // 2]
        one = own[own.damping == damping].sort_values("updates")
        first, last = one.iloc[0], one.iloc[-1]
        found.append(
            f"{100 * first.value:.1f} % after one update and {100 * last.value:.0f} % after {last.updates} "
            f"({stream}, α = {decay:g}, γ = {damping:g})"
        )
    return f"Off by {'; '.join(found)}."


def _precision(table: pd.DataFrame, claims: ClaimSheet) -> ClaimResult:
    middle = sorted(table.damping.unique())[len(table.damping.unique()) // 2 - 1]
    own = table[table.damping == middle]
    means = table.groupby("damping", sort=False)[["matrix", "inverse"]].median()
    text = "; ".join(f"{row.inverse:.1g} against {row.matrix:.1g} at γ = {d:g}" for d, row in means.iterrows())
    why = (
        "Without rounding the two are the same, because κ = σ/(γ(γ + σ)) grows with σ. With rounding, Eq. 18 "
        f"cancels where σ >> γ. Median errors, inverse against matrix: {text} (inf: it broke down)."
    )
    values = np.log10(own.inverse / own.matrix).to_numpy()
    return verdict(
        claims.claim("inverse-more-accurate", damping=f"{middle:g}"),
        values.mean(),
        t_interval(values),
        if_not_reproduced=why,
    )


# ------------------------------------------------------------------------------------ theory
def _convergence(convergence: pd.DataFrame, claims: ClaimSheet) -> Iterator[ClaimResult]:
    last = int(convergence["T"].max())
    before = int(convergence["T"][convergence["T"] <= last // 10 + 1].max())  # a decade, or the next more
    for damping, own in convergence.groupby("damping", sort=False):
        values = own.pivot_table(index="seed", columns="T", values="squared_gradient")
        ratios = (values[last] / values[before]).to_numpy()
        claim = claims.claim("theorem-1", of=f"damping-{damping:g}", last=f"{last:,}", before=f"{before:,}")
        yield verdict(
            claim,
            ratios.mean(),
            t_interval(ratios),
            if_not_reproduced="Σ η_t grows like log T: more steps of this schedule show little more.",
        )
    means = convergence.groupby(["damping", "T"], as_index=False)[["scaled", "bound"]].mean()
    ratio = (means.scaled / means.bound).to_numpy()
    place = means.iloc[int(ratio.argmax())]
    largest = float(ratio.max())
    yield verdict(
        claims.claim("theorem-1-bound"),
        largest,
        exact(largest, kind=f"largest of {len(ratio)}: γ = {place.damping:g}, T = {place['T']:g}"),
        if_not_reproduced="The bound is of an expectation; few seeds.",
    )


# ------------------------------------------------------------------------------------ cost
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
    slope = stats.log_log_slope(own["rank"], own.own_flops)
    yield verdict(
        claims.claim("flops-linear-in-rank"),
        slope,
        exact(slope, kind=f"counted, τ = {RANK} to {own['rank'].max():g}"),
        if_not_reproduced=(
            "A reflection that takes what is dropped to the last row costs O(Pτ), and so does what is measured of "
            "the basis in one of max(τ, 8) updates."
        ),
    )


def _scaling(computed: Computed, claims: ClaimSheet) -> Iterator[ClaimResult]:
    scaling, fits, flops = computed["scaling"], computed["fits"], computed["flops"]
    by_rank = scaling[(scaling.optimizer == "Ginger") & (scaling.sweep == "rank")]
    memory = fits[(fits.sweep == "rank") & (fits.quantity == "peak_bytes") & (fits.optimizer == "Ginger")]
    size = float(by_rank.num_parameters.iloc[0])
    slope = memory[memory.degree == 1].linear.iloc[0] / (4 * size)
    printed = flops[(flops.network == "ResNet-18") & (flops.optimizer == "Ginger")].dropna(subset="paper_memory")
    paper = np.polyfit(printed["rank"], 1e9 * printed.paper_memory / (4 * printed.num_parameters.iloc[0]), 1)[0]
    yield verdict(
        claims.claim("memory-per-rank", paper=paper),
        slope,
        exact(slope, kind="allocations counted"),
        if_not_reproduced="Another temporary that grows with τ.",
    )
