"""Products, seconds, the certificate and LiSSA's rate, on each fitted task."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from curvlab.lab import ClaimResult, ClaimSheet, Computed, bootstrap_interval, exact, judge, out_of_reach
from experiments.benchmarks.preconditioners.estimates import BATCH_TRACE, SQUARE, TRACE
from experiments.benchmarks.preconditioners.sampling import WAYS

TARGET = 1e-2
PEER = "curvlinops CG"


def judge_claims(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every fitted task by itself; counts are exact, and so is a single timing taken as it is."""
    table, lissa = computed["table"].assign(seconds=computed["timing"].seconds), computed["lissa"]
    estimates = computed.get("estimates")
    results: list[ClaimResult] = []
    for task, own in table[table.fitted].groupby("task", sort=False):
        results += _solving(str(task), own[own.target == TARGET], claims)
        results.append(_peer(str(task), own[own.target == TARGET], claims))
        results += _sampling(str(task), lissa[lissa.task == task].set_index("sampling"), claims)
        results += _estimates(str(task), estimates, claims)
    return results


def _estimates(task: str, estimates: pd.DataFrame | None, claims: ClaimSheet) -> list[ClaimResult]:
    asked = {"trace-estimates": TRACE, "sketch-estimates": SQUARE}
    found = []
    for name, quantity in asked.items():
        claim = claims.claim(name, of=task)
        if estimates is None:
            found.append(out_of_reach(claim, "These tables are older than the estimates: compute them again."))
            continue
        own = estimates[(estimates.task == task) & (estimates.quantity == quantity)]
        values = [own[own.sampling == WAYS[way]].value.to_numpy() for way in ("traces", "uniform")]
        ratio = float(_ratio(*values))
        interval = bootstrap_interval((*values,), _ratio, unit="draws", generator=np.random.default_rng(0))
        batches = estimates[(estimates.task == task) & (estimates.quantity == BATCH_TRACE)]
        exact_sd = batches.groupby("sampling").exact_sd.first() / float(batches.trace.iloc[0])
        reason = (
            f"By formula a batch's own trace varies by {100 * exact_sd[WAYS['uniform']]:.2g} % of tr(G) drawn "
            f"uniformly, by {100 * exact_sd[WAYS['traces']]:.2g} % drawn by traces; what is left is the probe's."
        )
        found.append(judge(claim, ratio, interval, if_not_reproduced=reason))
    return found


def _ratio(values: np.ndarray, uniform: np.ndarray) -> float:
    return float(np.std(values, ddof=1) / np.std(uniform, ddof=1))


def _solving(task: str, own: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    by_rows = own.preconditioner.str.contains("rows")
    reached = own.products.notna() | own.seconds.notna()
    products, seconds = claims.claim("products", of=task), claims.claim("seconds", of=task)
    with_rows, without = own[by_rows & reached], own[~by_rows & reached]
    if with_rows.empty or without.empty:
        reason = "No solver with rows, or none without, reaches the residual."
        return [out_of_reach(products, reason), out_of_reach(seconds, reason)]
    fewest, fastest = with_rows.sort_values("products").iloc[0], with_rows.sort_values("seconds").iloc[0]
    other = without.sort_values("seconds").iloc[0]
    least = without.sort_values("products").iloc[0]
    ratio = float(fastest.seconds / other.seconds)
    return [
        judge(
            products,
            float(fewest.products),
            exact(float(fewest.products)),
            if_not_reproduced=f"{fewest.preconditioner} takes fewest; without rows {least.preconditioner} does, "
            f"{least.products:.3g}.",
        ),
        judge(
            seconds,
            ratio,
            exact(ratio),
            if_not_reproduced=f"{fastest.preconditioner}: {fastest.seconds:.3g} s a system; "
            f"{other.preconditioner}: {other.seconds:.3g} s.",
        ),
    ]


def _peer(task: str, own: pd.DataFrame, claims: ClaimSheet) -> ClaimResult:
    """Judge the fastest setting of rows beside curvlinops' CG, where that has run and reaches the residual."""
    claim, peer = claims.claim("peer", of=task), own[own.preconditioner == PEER].seconds.dropna()
    by_rows = own[own.preconditioner.str.contains("rows")].seconds.dropna()
    if peer.empty or by_rows.empty:
        return out_of_reach(
            claim, "curvlinops is not installed or not asked for, or one does not reach the residual."
        )
    ratio = float(by_rows.min() / peer.iloc[0])
    why = f"{by_rows.min():.3g} s a system with rows, {peer.iloc[0]:.3g} s by curvlinops."
    return judge(claim, ratio, exact(ratio), if_not_reproduced=why)


def _sampling(task: str, own: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    traces, uniform = (own.loc[[WAYS[way]]].iloc[0] for way in ("traces", "uniform"))
    error = float(own.at[WAYS["traces"], "error"])  # type: ignore[arg-type]
    rate = error / float(traces.exact_rate) if math.isfinite(error) else math.inf
    importance = claims.claim("importance", of=task)
    found = [
        judge(
            claims.claim("certificate", of=task),
            float(traces.certified),
            exact(float(traces.certified)),
            if_not_reproduced=f"Over the directions tried, of 4,096 drawn examples, C is {traces.constant:.3g}.",
        )
    ]
    if not str(uniform.outcome).startswith("diverges"):
        reason = f"Uniform batches of {uniform.batch_size} do not diverge here: C is {uniform.constant:.3g}."
        return [*found, out_of_reach(importance, reason)]
    reason = (
        f"The error is {traces.error:.3g} after {traces.num_steps} steps, the slowest component of the exact "
        f"recursion {traces.exact_rate:.3g}: noise of the batches, or a start that other components hold."
    )
    return [*found, judge(importance, rate, exact(rate), if_not_reproduced=reason)]
