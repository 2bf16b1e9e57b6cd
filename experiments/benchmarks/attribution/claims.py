"""Which scores predict retraining: differences of LDS, and of rises after removal, query by query."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, out_of_reach
from curvlab.reporting import judge as judge_claim
from experiments.benchmarks.attribution.compute import OTHER, RESPONSES, SAME
from experiments.benchmarks.attribution.methods import EKFAC, FILTER, INFLUENCE, PBRF, RUN_DAMPING, UNROLLED
from experiments.target import Computed


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals are over queries, whose halves are the same."""
    results = []
    removals = computed["removals"]
    for task, own in computed["queries"].groupby("task", sort=False):
        of = str(task)
        same, other = (own[own.orders == orders] for orders in (SAME, OTHER))
        results.append(_judged(claims.claim("unrolled", of), _lds(same, UNROLLED)))
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
        difference = _lds(same, PBRF) - _lds(same, RUN_DAMPING)
        results.append(_judged(claims.claim("pbrf-predicts-like-influence", of), difference))
        agreement = _lds(own[own.orders == RESPONSES], RUN_DAMPING)
        results.append(_judged(claims.claim("influence-answers-pbrf", of), agreement))
        results += _removals(claims, of, removals[removals.task == task])
    return results


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
    generator = np.random.default_rng(0)
    interval = bootstrap_interval(
        values, lambda sample: float(np.mean(sample)), unit="queries", generator=generator
    )
    return judge_claim(claim, float(values.mean()), interval, if_not_reproduced=reason)


def _lds(queries: pd.DataFrame, method: str) -> np.ndarray:
    """Return a method's LDS of each query, at the damping whose mean is highest."""
    own = queries[queries.method == method]
    if own.damping.notna().any():
        own = own[own.damping == own.groupby("damping").lds.mean().idxmax()]
    return own.sort_values("query").lds.to_numpy()
