"""How many times faster, whether the same, and how many trainings a hundred halves are."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import ClaimResult, ClaimSheet, Computed, exact, judge, out_of_reach, t_interval
from experiments.benchmarks.retraining.compute import LEFT_OUT, ratios

NAMES = {LEFT_OUT: "faster-together"}


def judge_claims(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each network in each precision; intervals are over repeats."""
    results, floors = [], computed["floors"]
    for (task, dtype, what), own in computed["timing"].groupby(["task", "dtype", "what"], sort=False):
        of, values = f"{task}-{dtype}", ratios(own)
        claim = claims.claim(NAMES.get(str(what), "halves-in-ten-trainings"), of=of)
        floor = floors[(floors["task"] == task) & (floors["dtype"] == dtype)].iloc[0]
        reason = _reason(own, floor)
        interval = t_interval(values, unit="repeats")
        results.append(judge(claim, float(values.mean()), interval, if_not_reproduced=reason))
        if dtype == "float64" and what == LEFT_OUT:
            largest = float(own.difference.max())
            reason = f"The parameters have moved by up to {own.moved.max():.2g}."
            same = claims.claim("same-parameters", of=str(task))
            results.append(judge(same, largest, exact(largest), if_not_reproduced=reason))
    judged = {result.claim.id for result in results}
    return results + [
        out_of_reach(claims.claim(name), "This preset has no such comparison.")
        for name in claims.entries
        if not any(identity.startswith(name) for identity in judged)
    ]


def _reason(own: pd.DataFrame, floor: pd.Series) -> str:
    """Return what a step of one copy takes, and what its arithmetic alone would."""
    singly = own.copies if own.what.iloc[0] == LEFT_OUT else 1
    single = 1000 * (own.seconds_one_by_one / own.steps / singly).median()
    together = 1000 * (own.seconds_together / own.steps / own.copies).median()
    least = floor["batched_products ms"] + floor["update ms"]
    best = single / least if own.what.iloc[0] == LEFT_OUT else own.copies.iloc[0] * least / single
    return (
        f"A step takes {single:.3g} ms by itself and {together:.3g} ms for each network together; its matrix "
        f"products and the update alone, batched, are {least:.3g} ms: a ratio of {best:.3g} at best."
    )
