"""App. D: the inverse, the limit, the document frequencies, and TF-IDF itself."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, exact, out_of_reach, reporting
from experiments.shared.worst_case import farthest_ratio, judge_row, largest, smallest

SMALLEST_DAMPING = 1e-5  # below it the reference itself loses digits


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim."""
    table, inverse, limit = computed["table"], computed["inverse"], computed["limit"]
    checked = inverse[inverse.damping >= SMALLEST_DAMPING]
    closest = limit[limit.damping_ratio == limit.damping_ratio.min()]
    return [
        _exact(
            claims.claim("inverse-factored"),
            checked,
            checked.factored,
            largest(checked.factored),
            "Rounding: see the damping in inverse.csv.",
        ),
        _exact(
            claims.claim("inverse-printed"),
            checked,
            checked.printed,
            smallest(checked.printed),
            "The sign of the rank-one term is wrong: with a plus the difference is at most "
            f"{checked.corrected.max():.1e}. Between documents the term vanishes with λ, so the paper's "
            "conclusion does not depend on it.",
        ),
        _rank_one(claims.claim("rank-one-vanishes"), limit[limit.damping_ratio <= 0.1]),
        _exact(
            claims.claim("limit"),
            closest,
            closest.error_scaled,
            smallest(closest.error_scaled),
            "The gradients are |d| (TF - p), so the limit is |d|² (Σ TF TF / p - 1): the appendix drops |d|², a "
            "constant for documents of one length, and the -1, which shifts all values alike and changes no "
            f"ranking. With both the difference is at most {closest.error_corrected.max():.1e}.",
        ),
        _frequency(claims.claim("document-frequency"), computed["frequencies"]),
        _gain(claims.claim("tf-idf-rare"), table[table.vocabulary == "rare"]),
        _tf_idf(claims.claim("tf-idf-all"), table[table.vocabulary == "all"]),
    ]


def _exact(claim: Claim, table: pd.DataFrame, values: pd.Series, place: int, why: str) -> ClaimResult:
    return judge_row(claim, table, values, place, f"of {len(values)} settings", why)


def _rank_one(claim: Claim, small: pd.DataFrame) -> ClaimResult:
    slopes = [
        float(np.polyfit(np.log(own.damping), np.log(own.rank_one), 1)[0])
        for _, own in small.groupby(["corpus", "vocabulary"])
        if len(own) > 1
    ]
    if not slopes:
        return out_of_reach(claim, "Fewer than two dampings of at most 0.1 min p.")
    value = max(slopes, key=lambda slope: abs(slope - 1))
    interval = exact(value, kind=f"exact, of {len(slopes)} settings")
    return reporting.judge(claim, value, interval, if_not_reproduced="λ is not small against the smallest p.")


def _frequency(claim: Claim, frequencies: pd.DataFrame) -> ClaimResult:
    rare = frequencies[frequencies.expected <= 0.1]
    text, drawn = (rare[rare.source == source].ratio for source in ("text", "model"))
    if text.empty:
        return out_of_reach(claim, "No bin of words with |d| p of at most 0.1.")
    why = (
        "Words of real text come in bursts: one that occurs in a document is likely to occur there again. In "
        f"documents drawn from the model the farthest is {drawn.iloc[farthest_ratio(drawn)]:.3f}."
    )
    return _exact(claim, rare, text, farthest_ratio(text), why)


def _gain(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge what dividing by DF brings; the errors of both correlations as if independent, which is too wide."""
    closest = table[(table.damping_ratio == table.damping_ratio.min()) & (table.source == "text")]
    with_idf, without = (closest[closest.idf == idf].set_index("corpus") for idf in ("root", "none"))
    left = (1 - with_idf.spearman) / (1 - without.spearman)
    error = np.hypot(with_idf.spearman_stderr, left * without.spearman_stderr) / (1 - without.spearman)
    corpus = str(left.idxmax())
    value, count = 1 - float(left[corpus]), int(with_idf.num_queries[corpus])
    half = float(stats.t.ppf(0.975, count - 1)) * float(error[corpus])
    drawn = table[(table.damping_ratio == table.damping_ratio.min()) & (table.source == "model")]
    model = float(drawn[drawn.idf == "root"].spearman.min())
    why = (
        f"Correlations on {corpus}: {with_idf.spearman[corpus]:.3f} with IDF, {without.spearman[corpus]:.3f} "
        f"without. In documents drawn from the model it is at least {model:.3f} with IDF: what is off is not the "
        "derivation but the model, in which words do not come in bursts."
    )
    interval = Interval(value - half, value + half, f"t 95 %, {count} queries, {corpus}", count)
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


def _tf_idf(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    closest = table[table.damping_ratio == table.damping_ratio.min()]
    text = closest[(closest.idf == "root") & (closest.source == "text")]
    model = float(closest[(closest.idf == "root") & (closest.source == "model")].spearman.min())
    usual = float(closest[(closest.idf == "log") & (closest.source == "text")].spearman.min())
    row = text.iloc[smallest(text.spearman)]
    value, count = float(row.spearman), int(row.num_queries)
    half = float(stats.t.ppf(0.975, count - 1)) * float(row.spearman_stderr)
    why = (
        "Frequent words break the assumption p |d| << 1: DF stops at 1 while |d| p grows, so 1 / DF weights "
        f"them more than influence does, in documents drawn from the model too ({model:.3f}). The usual log(1 "
        f"/ DF) takes that weight away: {usual:.3f}. Without frequent words it holds, see tf-idf-rare."
    )
    return reporting.judge(
        claim,
        value,
        Interval(value - half, value + half, f"t 95 %, {count} queries, {row.corpus}", count),
        if_not_reproduced=f"{why} Of the most similar documents {text.overlap.min():.2f} are shared.",
    )
