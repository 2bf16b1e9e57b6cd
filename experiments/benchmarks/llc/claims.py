"""Are the estimates right where the answer is known, the same as a peer's, and valid by the house's own rule?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, exact, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.benchmarks.llc.default_sampler import MEASURED

PEER = "devinterp, with replacement"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the polynomials, the peer, and the estimates' validity."""
    table, known = computed["table"], computed["known"]
    num_chains = int(computed.config["known"]["num_chains"])
    results = [
        _polynomial(claims.claim("polynomial", of=_slug(row.problem)), row, num_chains)
        for _, row in known.iterrows()
    ]
    results.append(_bias(claims.claim("unbiased"), known))
    results.append(_peer(claims.claim("agrees-with-devinterp"), table))
    results += _default_sampler(claims, computed["default_sampler"])
    return [*results, _valid(claims.claim("valid"), table, known)]


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


def _default_sampler(claims: ClaimSheet, table: pd.DataFrame) -> list[ClaimResult]:
    """Judge every step from devinterp's defaults, and what its batches do where that is measured."""
    if table.empty:
        names = ("default-settings", "default-sampler", "default-sampler-control")
        reason = "The steps from devinterp's defaults are not run at this preset (`default_sampler.num_repeats`)."
        return [out_of_reach(claims.claim(name, of="all"), reason) for name in names]
    results = []
    problems = table.assign(problem=table.get("problem", "")).fillna({"problem": ""}).set_index("step").problem
    for _, row in table.iterrows():
        of = row.step.replace(",", "").replace(" ", "-")
        found = [("default-settings", row.ratio, row.ratio_low, row.ratio_high)]
        if row.step in MEASURED and not row.replacement:
            found.append(("default-sampler", row.sampler_ratio, row.sampler_ratio_low, row.sampler_ratio_high))
        elif row.step in MEASURED:
            shares = [value / row.estimate for value in (row.sampler, row.sampler_low, row.sampler_high)]
            found.append(("default-sampler-control", *shares))
        for name, value, low, high in found:
            claim = claims.claim(name, of=of)
            if np.isnan(row.estimate):
                results.append(out_of_reach(claim, problems.get(row.step) or "devinterp is not installed."))
                continue
            why = (
                f"devinterp has {row.estimate:.4g} ({row.estimate_low:.4g} to {row.estimate_high:.4g}), curvlab "
                f"{row.curvlab:.4g}, of L(w0) {row.initial_loss_part:.3g} (± {row.initial_loss_sd:.3g} a repeat)."
            )
            if name != "default-settings":
                first_order = f"{row.sampler_first_order:.3g} to first order"
                why = f"{row.sampler:.3g} measured, {row.sampler_told:.3g} told, {first_order}."
            interval = Interval(low, high, "t 95 %, chains", int(row.chains))
            results.append(judge_claim(claim, float(value), interval, if_not_reproduced=why))
    return results


def _valid(claim: Claim, table: pd.DataFrame, known: pd.DataFrame) -> ClaimResult:
    """Judge the share over all estimates of the target, of whatever kind."""
    compared = table.drop_duplicates(["threads", "repeat", "method"]).problem.fillna("")
    kinds = {
        "of the methods": (compared == "").to_numpy(),
        "of polynomials": known.valid.to_numpy(dtype=bool),
    }
    share = float(np.mean(np.concatenate(list(kinds.values()))))
    counts = ", ".join(f"{int(valid.sum())} of {len(valid)} {kind}" for kind, valid in kinds.items())
    problems = "; ".join(sorted(set(compared) - {""}))
    interval = exact(share, kind=f"{sum(map(len, kinds.values()))} estimates")
    return judge_claim(claim, share, interval, if_not_reproduced=f"Valid: {counts}. {problems}".strip())
