"""Which scores predict retraining: differences of LDS, query by query."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, out_of_reach
from curvlab.reporting import judge as judge_claim
from experiments.benchmarks.attribution.compute import OTHER, SAME
from experiments.benchmarks.attribution.methods import EKFAC, FILTER, INFLUENCE, RUN_DAMPING, UNROLLED
from experiments.target import Computed


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals are over queries, whose halves are the same."""
    results = []
    for task, own in computed["queries"].groupby("task", sort=False):
        of = str(task)
        same, other = (own[own.orders == orders] for orders in (SAME, OTHER))
        results.append(_judged(claims.claim("unrolled", of), _lds(same, UNROLLED)))
        best = _lds(same, INFLUENCE)
        for name, method in (("filter-needs-no-tuning", FILTER), ("damping-needs-no-tuning", RUN_DAMPING)):
            results.append(_judged(claims.claim(name, of), best - _lds(same, method)))
        strongest = max(
            (method for method in same.method.unique() if EKFAC in method),
            key=lambda method: float(_lds(same, method).mean()),
        )
        reason = f"The best of them is {strongest}, {_lds(same, strongest).mean():.2f}."
        above = _lds(same, FILTER) - _lds(same, strongest)
        results.append(_judged(claims.claim("filter-above-ekfac", of), above, reason))
        claim = claims.claim("unrolled-above-filter", of)
        if len(other):
            reason = "It differentiates one order of the batches; its mean over orders stands in the table, too."
            results.append(_judged(claim, _lds(other, UNROLLED) - _lds(other, FILTER), reason))
        else:
            results.append(out_of_reach(claim, "there is one order of the batches only: num_orders=1"))
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
