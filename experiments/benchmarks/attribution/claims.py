"""Which scores predict retraining: differences of LDS over halves and queries, and of rises after removal."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Computed
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import Interval, bootstrap_interval
from experiments.benchmarks.attribution import methods
from experiments.benchmarks.attribution.ranks import OTHER, SAME, correlations, lds_interval
from experiments.benchmarks.attribution.which_score import RESPONSES, not_minimised
from experiments.shared.stats import mean

CLAIMS: tuple[str, ...] = ("unrolled", "filter-needs-no-tuning", "damping-needs-no-tuning", "filter-above-ekfac")
CLAIMS += ("unrolled-above-filter", "unrolled-above-ekfac", "filter-above-peers-ekfac")
CLAIMS += ("unrolled-above-peers-ekfac", "pbrf-predicts-like-influence", "influence-answers-pbrf")
CLAIMS += ("halves-in-ten-trainings",)
CLAIMS += tuple(f"{of}-removal-above-{what}" for of in ("filter", "unrolled") for what in ("random", "rivals"))
OURS = {"filter": methods.FILTER, "unrolled": methods.UNROLLED}
TOGETHER = " halves together"  # the number before it
PROFILE = (
    "In a profile of tanh MLPs a step of all copies is batched matrix products, which alone take several "
    "trainings, and one kernel each for tanh, its derivative, the loss and the update; a training by itself is "
    "mostly calls, of which little is left to share."
)
MIN_QUERIES = 6  # a bootstrap of fewer is the range of what was seen


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals of LDS draw halves and queries anew, of one network."""
    results = []
    ranks, removals, queries = computed["ranks"], computed["removals"], computed["queries"]
    for task, rows in ranks.groupby("task", sort=False):
        of, own = str(task), rows.dropna(axis="columns", how="all")
        reason = _part_way(computed["rest"], of)
        results.append(_lds(claims.claim("unrolled", of), own, {methods.UNROLLED: 1}, reason=reason))
        for name, method in {"filter": methods.FILTER, "damping": methods.RUN_DAMPING}.items():
            claim = claims.claim(f"{name}-needs-no-tuning", of)
            results.append(_lds(claim, own, {methods.INFLUENCE: 1, method: -1}))
        results += _against_ekfac(claims, of, own)
        claim = claims.claim("unrolled-above-filter", of)
        terms = {methods.UNROLLED: 1.0, methods.FILTER: -1.0}
        reason = "It differentiates one order of the batches; its mean over orders stands in the table, too."
        lacking = out_of_reach(claim, "there is one order of the batches only: num_orders=1")
        results.append(_lds(claim, own, terms, OTHER, reason=reason) if OTHER in own else lacking)
        results += _against_pbrf(claims, of, own, queries[queries.task == task], computed["table"])
        results += _removals(claims, of, removals[removals.task == task])
        results.append(_together(claims.claim("halves-in-ten-trainings", of), computed["timing"], of))
    return results


def _together(claim: Claim, timing: pd.DataFrame, of: str) -> ClaimResult:
    """Judge the seconds of the halves together, by as many orders of the batches as there are."""
    own = timing[(timing.task == of) & timing.method.str.endswith(TOGETHER)]
    copies = int(own.method.iloc[0].removesuffix(TOGETHER))
    values = own.trainings.to_numpy() * 100 / copies
    reason = f"Measured with {copies}. " + (PROFILE if of.startswith("mlp") else "One by one: no vmap pays here.")
    return judge_claim(claim, *mean(values, unit="orders"), if_not_reproduced=reason)


def _against_pbrf(
    claims: ClaimSheet, of: str, ranks: pd.DataFrame, queries: pd.DataFrame, table: pd.DataFrame
) -> list[ClaimResult]:
    predicts, answers = (
        claims.claim("pbrf-predicts-like-influence", of),
        claims.claim("influence-answers-pbrf", of),
    )
    row = table[(table.task == of) & (table.method == methods.PBRF)].iloc[0]
    if reason := not_minimised(row):
        return [out_of_reach(claim, f"The PBRF of the examples is {reason}.") for claim in (predicts, answers)]
    reason = f"Of the gradient of each example's objective {row.gradient_norm:.1g} is left (median)."
    agreement = queries[(queries.orders == RESPONSES) & (queries.method == methods.RUN_DAMPING)].lds.to_numpy()
    return [
        _lds(predicts, ranks, {methods.PBRF: 1, methods.RUN_DAMPING: -1}, reason=reason),
        _over_queries(answers, agreement, reason),
    ]


def _part_way(rest: pd.DataFrame, of: str) -> str:
    """Say what the derivative is worth where its first order is nearly all."""
    found = rest[(rest.task == of) & (rest.predictor == methods.UNROLLED)]
    last = found[found.num_epochs == found.num_epochs.max()]
    value = last.lds_part_way.iloc[0]
    return (
        f"Against retraining with weights moved a part of the way to a half's it has {value:.2f}: what is missing "
        "is beyond the first order."
    )


def _against_ekfac(claims: ClaimSheet, of: str, ranks: pd.DataFrame) -> list[ClaimResult]:
    results = []
    every = [str(method) for method in ranks if methods.EKFAC in str(method)]
    peers = [method for method in every if method != methods.EKFAC]
    for suffix, rivals in (("ekfac", every), ("peers-ekfac", peers)):
        for name, method in OURS.items():
            claim = claims.claim(f"{name}-above-{suffix}", of)
            if not rivals:
                results.append(out_of_reach(claim, "no EK-FAC of kronfluence or dattri ran: see the table"))
                continue
            values = {rival: correlations(ranks, rival, SAME).mean() for rival in rivals}
            strongest = max(rivals, key=lambda rival: values[rival])
            reason = f"The best of them is {strongest}, {values[strongest]:.2f}."
            results.append(_lds(claim, ranks, {method: 1, strongest: -1}, reason=reason))
    return results


def _removals(claims: ClaimSheet, of: str, removals: pd.DataFrame) -> list[ClaimResult]:
    """Judge against random removals, at the smallest fraction, and against the best rival at every one."""
    results = []
    every = removals.method.unique()
    rivals = [m for m in every if m == methods.DOT or methods.EKFAC in m or m.startswith(methods.TRAK)]
    for name, method in OURS.items():
        for fraction, each in removals.groupby("fraction"):
            rises = each.pivot(index="query", columns="method", values="rise")
            if fraction == removals.fraction.min():
                usual = each[each.method == method].set_index("query").random
                claim = claims.claim(f"{name}-removal-above-random", of)
                results.append(_over_queries(claim, (rises[method] - usual).to_numpy()))
            strongest = str(rises[rivals].mean().idxmax())
            share = 100 * float(fraction)  # type: ignore[arg-type]  # a number
            best, this = rises[strongest].mean(), rises[method].mean()
            reason = f"The best of them is {strongest}, {best:.2g}; this one has {this:.2g}."
            claim = claims.claim(f"{name}-removal-above-rivals", f"{of}-{share:g}", task=of, share=f"{share:g}")
            results.append(_over_queries(claim, (rises[method] - rises[strongest]).to_numpy(), reason))
    return results


def _lds(
    claim: Claim, ranks: pd.DataFrame, terms: dict[str, float], orders: str = SAME, reason: str = "See the table."
) -> ClaimResult:
    """Judge a sum of signed LDS, {method: sign}."""
    value = sum(sign * float(correlations(ranks, method, orders).mean()) for method, sign in terms.items())
    return judge_claim(claim, value, lds_interval(ranks, terms, orders), if_not_reproduced=reason)


def _over_queries(claim: Claim, values: np.ndarray, reason: str = "See the table.") -> ClaimResult:
    """Judge a mean over queries, where no halves are behind each value."""
    generator, unit = np.random.default_rng(0), "queries, one network"
    if len(values) < MIN_QUERIES:
        interval = Interval(np.nan, np.nan, f"no interval of {len(values)} {unit}", len(values))
    else:
        interval = bootstrap_interval(values, np.mean, unit=unit, generator=generator)
    return judge_claim(claim, float(values.mean()), interval, if_not_reproduced=reason)
