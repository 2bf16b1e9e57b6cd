"""The Proposition: the printed equality, the bound that is true, and the estimate's pros and cons.

It is an exact statement, and judged by the exact formulas, which are ours: how far Monte Carlo is from them, in
standard errors, is z in summary.csv.
"""

from __future__ import annotations

import math

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, t_interval
from curvlab.lab import judge as verdict
from experiments.rank1.verdicts import judge_extreme


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims from the table."""
    table = computed["table"]
    shifted, plain = table[table.delta > 0], table[table.delta == 0]
    symmetric = table[table.form == "S"]
    isotropic = symmetric[symmetric.spectrum == "isotropic"]
    skew = plain[(plain.spectrum != "isotropic") & (plain.n > 1)]
    definite = skew[~skew.spectrum.isin(["signed", "mirrored"])]
    visible = shifted[(shifted.form == "S") & (shifted.bias_ratio > 1.5)]
    sizes = (visible.n**0.5 * visible.delta).to_numpy()
    return [
        _mean(
            claims.claim("unbiased"), plain.bias_ratio, "The estimate of the mean is off: more draws will tell."
        ),
        _mean(claims.claim("shift-biased"), visible.bias_norm / sizes, "Too few draws for the bias to stand out."),
        _least(claims.claim("not-symmetric"), skew[skew.form == "D"].share_asymmetric),
        _least(claims.claim("not-psd"), definite.share_indefinite),
        _largest(
            claims.claim("equality"),
            symmetric,
            (symmetric.exact / symmetric.stated - 1).abs(),
            "The exact value depends on ‖H‖_F and tr(H), see `exact` in the table; λ² n (n - 1) is its maximum "
            "over all H of spectral norm λ, attained by multiples of the identity (unsymmetrised, by H² = λ² I).",
        ),
        _largest(
            claims.claim("equality-isotropic"),
            isotropic,
            (isotropic.exact / isotropic.stated - 1).abs(),
            "The formula is off.",
        ),
        _largest(
            claims.claim("upper-bound"),
            plain,
            plain.exact / plain.stated,
            "The bound follows from the exact formula.",
        ),
        _largest(
            claims.claim("largest-eigenvalue"),
            plain,
            plain.exact / plain.stated_with_largest,
            "An indefinite H can have a large norm and a small largest eigenvalue. λ must be the spectral norm.",
        ),
        judge_extreme(
            claims.claim("sigma-bound"),
            float((plain.mean_norm / plain.stated**0.5).max()),
            f"largest of {len(plain)} settings",
            why="It follows from Jensen's inequality and the bound above.",
        ),
    ]


def _mean(claim: Claim, values: pd.Series, why: str) -> ClaimResult:
    value = float(values.mean()) if len(values) else None
    return verdict(claim, value, t_interval(values.to_numpy(), unit="settings"), if_not_reproduced=why)


def _least(claim: Claim, shares: pd.Series) -> ClaimResult:
    why = "Only a direction that is an eigenvector gives a symmetric and semi-definite D."
    return judge_extreme(claim, float(shares.min()), f"least of {len(shares)} settings", why=why)


def _largest(claim: Claim, table: pd.DataFrame, values: pd.Series, why: str) -> ClaimResult:
    where = int(values.to_numpy().argmax())
    row, value = table.iloc[where], float(values.iloc[where])
    if not math.isfinite(value):
        raise ValueError(
            f"claim {claim.id}: the largest value is not finite; look at {row.spectrum}, n = {row.n}."
        )
    largest = (
        f"{why} Largest: {row.spectrum}, n = {row.n}, {row.form}, where Monte Carlo has {row.measured:.6g} ± "
        f"{row.stderr:.2g} and the formula {row.exact:.6g}."
    )
    return judge_extreme(claim, value, f"largest of {len(table)} settings, closed form", why=largest)
