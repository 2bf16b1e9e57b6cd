"""Which scores predict retraining: differences of LDS, and of rises after removal, query by query."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, Interval, bootstrap_interval, out_of_reach
from curvlab.reporting import judge as judge_claim
from experiments.benchmarks.attribution.compute import OTHER, RESPONSES, SAME
from experiments.benchmarks.attribution.methods import EKFAC, FILTER, INFLUENCE, PBRF, RUN_DAMPING, UNROLLED
from experiments.target import Computed

MAX_GRADIENT = 0.1  # of the gradient at the start; with more of it left a PBRF is not one
MIN_QUERIES = 6  # a bootstrap of fewer is the range of what was seen


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals are over queries: the halves, and the network, are held fixed."""
    results = []
    removals = computed["removals"]
    for task, own in computed["queries"].groupby("task", sort=False):
        of = str(task)
        same, other = (own[own.orders == orders] for orders in (SAME, OTHER))
        results.append(
            _judged(claims.claim("unrolled", of), _lds(same, UNROLLED), _part_way(computed["rest"], of))
        )
        best = _lds(same, INFLUENCE)
        for name, method in (("filter-needs-no-tuning", FILTER), ("damping-needs-no-tuning", RUN_DAMPING)):
            results.append(_judged(claims.claim(name, of), best - _lds(same, method)))
        results += _against_ekfac(claims, of, same)
        claim = claims.claim("unrolled-above-filter", of)
        if len(other):
            reason = "It differentiates one order of the batches; its mean over orders stands in the table, too."
            results.append(_judged(claim, _lds(other, UNROLLED) - _lds(other, FILTER), reason))
        else:
            results.append(out_of_reach(claim, "there is one order of the batches only: num_orders=1"))
        results += _against_pbrf(claims, of, own, computed["table"])
        results += _removals(claims, of, removals[removals.task == task])
    return results


def _against_pbrf(claims: ClaimSheet, of: str, own: pd.DataFrame, table: pd.DataFrame) -> list[ClaimResult]:
    same, name = own[own.orders == SAME], "pbrf-predicts-like-influence"
    pairs = [(claims.claim(name, of), _lds(same, PBRF) - _lds(same, RUN_DAMPING))]
    pairs.append((claims.claim("influence-answers-pbrf", of), _lds(own[own.orders == RESPONSES], RUN_DAMPING)))
    left = float(table[(table.task == of) & (table.method == PBRF)].gradient_norm.iloc[0])
    if not left <= MAX_GRADIENT:
        reason = (
            f"The PBRF of the examples is not at its minimum: a median gradient norm of {left:.2g} of that at the "
            f"start is left, needed: {MAX_GRADIENT:g}."
        )
        return [out_of_reach(claim, reason) for claim, _ in pairs]
    reason = f"Of the gradient of each example's objective {left:.1g} is left (median)."
    return [_judged(claim, values, reason) for claim, values in pairs]


def _part_way(rest: pd.DataFrame, of: str) -> str:
    """Say what the derivative is worth where its first order is nearly all."""
    found = rest[(rest.task == of) & (rest.predictor == UNROLLED)]
    last = found[found.num_epochs == found.num_epochs.max()]
    value = last.lds_part_way.iloc[0]
    return (
        f"Against retraining with weights moved a part of the way to a half's it has {value:.2f}: what is missing "
        "is beyond the first order."
    )


def _against_ekfac(claims: ClaimSheet, of: str, same: pd.DataFrame) -> list[ClaimResult]:
    results = []
    every = [method for method in same.method.unique() if EKFAC in method]
    for suffix, rivals in (("ekfac", every), ("peers-ekfac", [method for method in every if method != EKFAC])):
        for name, method in (("filter-above", FILTER), ("unrolled-above", UNROLLED)):
            claim = claims.claim(f"{name}-{suffix}", of)
            if not rivals:
                results.append(out_of_reach(claim, "no EK-FAC of kronfluence or dattri ran: see the table"))
                continue
            strongest = max(rivals, key=lambda rival: float(_lds(same, rival).mean()))
            reason = f"The best of them is {strongest}, {_lds(same, strongest).mean():.2f}."
            results.append(_judged(claim, _lds(same, method) - _lds(same, strongest), reason))
    return results


def _removals(claims: ClaimSheet, of: str, removals: pd.DataFrame) -> list[ClaimResult]:
    """Judge the smallest fraction, where a ranking counts most."""
    smallest = removals[removals.fraction == removals.fraction.min()]
    results = []
    for name, method in (("filter", FILTER), ("unrolled", UNROLLED)):
        own = smallest[smallest.method == method].sort_values("query")
        above = (own.rise - own.random).to_numpy()
        results.append(_judged(claims.claim(f"{name}-removal-above-random", of), above))
    return results


def _judged(claim: Claim, values: np.ndarray, reason: str = "See the table.") -> ClaimResult:
    generator, unit = np.random.default_rng(0), "queries, the halves held fixed"
    if len(values) < MIN_QUERIES:
        interval = Interval(np.nan, np.nan, f"no interval of {len(values)} {unit}", len(values))
    else:
        interval = bootstrap_interval(
            values, lambda sample: float(np.mean(sample)), unit=unit, generator=generator
        )
    return judge_claim(claim, float(values.mean()), interval, if_not_reproduced=reason)


def _lds(queries: pd.DataFrame, method: str) -> np.ndarray:
    """Return a method's LDS of each query, at the damping whose mean is highest."""
    own = queries[queries.method == method]
    if own.damping.notna().any():
        own = own[own.damping == own.groupby("damping").lds.mean().idxmax()]
    return own.sort_values("query").lds.to_numpy()
