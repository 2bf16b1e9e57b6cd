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
    known, num_chains = computed["known"], int(computed.config["known"]["num_chains"])
    results = [
        _linear(
            claims.claim("linear-network", of=f"{row.network}-{row.sampler}"), row, computed["population_chains"]
        )
        for _, row in networks.iterrows()
    ]
    results += [
        _polynomial(claims.claim("polynomial", of=_slug(row.problem)), row, num_chains)
        for _, row in known.iterrows()
    ]
    results.append(_bias(claims.claim("unbiased"), known))
    results.append(_peer(claims.claim("agrees-with-devinterp"), table))
    return [*results, _valid(claims.claim("valid"), table, known, networks)]


def _linear(claim: Claim, row: pd.Series, population: pd.DataFrame) -> ClaimResult:
    if row.problem:
        ratio = f"{row.ratio:.3g} ({row.low / row.known:.3g} to {row.high / row.known:.3g})"
        return out_of_reach(claim, f"The rule says of the chains: {row.problem}. Their ratio is {ratio}.")
    interval = Interval(row.low / row.known, row.high / row.known, "t 95 %, chains", 4)
    why = f"The coefficient is that of n to infinity, {row.known:g}."
    if len(population):
        cases = [f"{own.case} {own.first / own.known:.2f} to {own.ratio:.2f}" for _, own in population.iterrows()]
        why += f" On the exact loss, from the first quarter of the chain to the last: {', '.join(cases)}."
    return judge_claim(claim, float(row.ratio), interval, if_not_reproduced=why)


def _polynomial(claim: Claim, row: pd.Series, num_chains: int) -> ClaimResult:
    if not row.valid:
        ratio = f"{row.estimate / row.at_this_n:.3g}"
        return out_of_reach(
            claim, f"The rule finds its chains not valid (R-hat {row.rhat:.3g}); the ratio is {ratio}."
        )
    interval = Interval(row.low / row.at_this_n, row.high / row.at_this_n, "t 95 %, chains", num_chains)
    why = f"R-hat is {row.rhat:.3g}; the asymptotic coefficient is {row.asymptotic:.3g}."
    return judge_claim(claim, row.estimate / row.at_this_n, interval, if_not_reproduced=why)


def _slug(problem: str) -> str:
    return problem.replace(" + ", "-plus-").replace(" ", "-").replace("^", "")


def _bias(claim: Claim, known: pd.DataFrame) -> ClaimResult:
    ratios = (known.estimate / known.at_this_n).to_numpy()
    above = f"{int((ratios > 1).sum())} of {len(ratios)} ratios are above 1."
    why = f"{above} Steps of a finite size widen what the chains draw from."
    return judge_claim(claim, ratios.mean(), t_interval(ratios, unit="polynomials"), if_not_reproduced=why)


def _peer(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    if PEER not in set(table.method):
        return out_of_reach(claim, "devinterp is not installed.")
    means = table.groupby(["threads", "repeat", "method"]).llc.mean().unstack()
    ratios = (means[PEER] / means["curvlab"]).to_numpy()
    why = f"curvlab has {means['curvlab'].mean():.4g}, devinterp {means[PEER].mean():.4g}."
    return judge_claim(claim, ratios.mean(), t_interval(ratios, unit="repeats"), if_not_reproduced=why)


def _valid(claim: Claim, table: pd.DataFrame, known: pd.DataFrame, networks: pd.DataFrame) -> ClaimResult:
    """Judge the share over all estimates of the target, of whatever kind."""
    compared = table.drop_duplicates(["threads", "repeat", "method"]).problem.fillna("")
    kinds = {
        "of the methods": (compared == "").to_numpy(),
        "of polynomials": known.valid.to_numpy(dtype=bool),
        "of linear networks": (networks.problem == "").to_numpy(),
    }
    share = float(np.mean(np.concatenate(list(kinds.values()))))
    counts = ", ".join(f"{int(valid.sum())} of {len(valid)} {kind}" for kind, valid in kinds.items())
    problems = "; ".join(sorted({*compared, *networks.problem} - {""}))
    interval = exact(share, kind=f"{sum(map(len, kinds.values()))} estimates")
    return judge_claim(claim, share, interval, if_not_reproduced=f"Valid: {counts}. {problems}".strip())
