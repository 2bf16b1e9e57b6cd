"""Are the estimates right where the answer is known, the same as a peer's, and valid by the house's own rule?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, Interval, exact, out_of_reach, t_interval
from curvlab.reporting import judge as judge_claim
from experiments.target import Computed

PEER = "devinterp, with replacement"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each linear network and sampler, the polynomials, the peer, and the estimates' validity."""
    networks, table = computed["linear_networks"].fillna({"problem": ""}), computed["table"]
    results = [
        _linear(claims.claim("linear-network", of=f"{row.network}-{row.sampler}"), row)
        for _, row in networks.iterrows()
    ]
    results.append(_polynomials(claims.claim("polynomials"), computed["known"]))
    results.append(_peer(claims.claim("agrees-with-devinterp"), table))
    return [*results, _valid(claims.claim("valid"), table)]


def _linear(claim: Claim, row: pd.Series) -> ClaimResult:
    interval = Interval(row.low / row.known, row.high / row.known, "t 95 %, chains", 4)
    why = f"The coefficient is that of n to infinity, {row.known:g}; the rule says of the chains: "
    return judge_claim(claim, float(row.ratio), interval, if_not_reproduced=why + (row.problem or "nothing") + ".")


def _polynomials(claim: Claim, known: pd.DataFrame) -> ClaimResult:
    worst = known.iloc[(known.estimate / known.at_this_n - 1).abs().argmax()]
    interval = Interval(worst.low / worst.at_this_n, worst.high / worst.at_this_n, "t 95 %, chains", 100)
    why = f"The worst is {worst.problem}."
    return judge_claim(claim, worst.estimate / worst.at_this_n, interval, if_not_reproduced=why)


def _peer(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    if PEER not in set(table.method):
        return out_of_reach(claim, "devinterp is not installed.")
    means = table.groupby(["threads", "repeat", "method"]).llc.mean().unstack()
    ratios = (means[PEER] / means["curvlab"]).to_numpy()
    why = f"curvlab has {means['curvlab'].mean():.4g}, devinterp {means[PEER].mean():.4g}."
    return judge_claim(claim, ratios.mean(), t_interval(ratios, unit="repeats"), if_not_reproduced=why)


def _valid(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    estimates = table.drop_duplicates(["threads", "repeat", "method"])
    problems = estimates.problem.fillna("")
    share = float(np.mean(problems == ""))
    why = "; ".join(sorted(set(problems) - {""})) or "No estimate has a problem."
    return judge_claim(claim, share, exact(share, kind=f"{len(estimates)} estimates"), if_not_reproduced=why)
