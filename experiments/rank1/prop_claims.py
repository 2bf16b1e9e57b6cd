"""The Proposition, claims: the printed equality, the bound that is true, and the estimate's pros and cons.

The exact formulas are ours: how far Monte Carlo is from them, in standard errors, is z in summary.csv.
"""

from __future__ import annotations

import math

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, exact, judge, t_interval

PROPOSITION = "Semenov 2025, slides, Proposition"
ESTIMATE = "Semenov 2025, slides, Uniform Direction preconditioner, pros and cons"

UNBIASED = Claim(
    id="unbiased",
    statement="The estimate is unbiased, E[D] = H; so is its symmetrised form S.",
    source=ESTIMATE,
    paper_value="equality",
    measure="K‖mean of K draws - H‖² over its expectation without bias, mean over spectra, sizes, forms (δ = 0)",
    criterion=Criterion(at_least=0.9, at_most=1.1),
)
SHIFT_BIASED = Claim(
    id="shift-biased",
    statement="Adding δI loses the unbiasedness.",
    source=ESTIMATE,
    paper_value="stated without a size; it is ‖δI‖ = √n δ",
    measure="estimated ‖E[S + δI] - H‖ over √n δ, mean over spectra and sizes, where it stands out of the noise",
    criterion=Criterion(at_least=0.9, at_most=1.1),
)
ASYMMETRIC = Claim(
    id="not-symmetric",
    statement="D = n H u uᵀ is not symmetric.",
    source=ESTIMATE,
    paper_value=None,
    measure="share of draws with D different from Dᵀ, least over spectra other than the isotropic one",
    criterion=Criterion(at_least=0.99),
)
NOT_PSD = Claim(
    id="not-psd",
    statement="D is not positive semi-definite, although H is.",
    source=ESTIMATE,
    paper_value=None,
    measure="share of draws whose symmetric part has a negative eigenvalue, least over PSD spectra other than the "
    "isotropic one",
    criterion=Criterion(at_least=0.99),
)
EQUALITY = Claim(
    id="equality",
    statement="E‖D - H‖²_F equals λmax² n (n - 1) + n δ².",
    source=PROPOSITION,
    paper_value="equality for every H",
    measure="largest relative deviation of the measured value from it, all spectra, sizes, δ, D = S + δI",
    criterion=Criterion(at_most=0.05),
)
ISOTROPIC = Claim(
    id="equality-isotropic",
    statement="For H a multiple of the identity, E‖D - H‖²_F equals λmax² n (n - 1) + n δ².",
    source=PROPOSITION,
    paper_value="equality",
    measure="largest relative deviation of the measured value, isotropic spectrum, all sizes, δ, D = S + δI",
    criterion=Criterion(at_most=0.01),
)
BOUND = Claim(
    id="upper-bound",
    statement="E‖D - H‖²_F is at most λ² n (n - 1) + n δ² with λ the spectral norm.",
    source=PROPOSITION,
    paper_value="at most 1 (printed as equality)",
    measure="largest ratio of the measured value to it, all spectra, sizes and both forms; δ = 0, since a shift "
    "adds n δ² to both sides",
    criterion=Criterion(at_most=1 + 1e-9),
)
LARGEST = Claim(
    id="largest-eigenvalue",
    statement="The same with λ the largest eigenvalue, as the symbol λmax says, also for indefinite H.",
    source=PROPOSITION,
    paper_value="at most 1 (printed as equality)",
    measure="largest ratio of the measured value to the bound with the largest eigenvalue, as above",
    criterion=Criterion(at_most=1 + 1e-9),
)
SIGMA = Claim(
    id="sigma-bound",
    statement="σ = E‖D - H‖_F is at most the root of the Proposition's value.",
    source="Semenov 2025, slides, definition of σ",
    paper_value="at most 1",
    measure="largest ratio of the mean norm to it (spectral norm for λ), as above",
    criterion=Criterion(at_most=1 + 1e-9),
)


def judge_claims(table: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims from the table."""
    shifted, plain = table[table.delta > 0], table[table.delta == 0]
    symmetric = table[table.form == "S"]
    skew = plain[(plain.spectrum != "isotropic") & (plain.n > 1)]
    definite = skew[~skew.spectrum.isin(["signed", "mirrored"])]
    visible = shifted[(shifted.form == "S") & (shifted.bias_ratio > 1.5)]
    sizes = (visible.n**0.5 * visible.delta).to_numpy()
    return [
        _mean(UNBIASED, plain.bias_ratio, "The estimate of the mean is off: more draws will tell."),
        _mean(SHIFT_BIASED, visible.bias_norm / sizes, "Too few draws for the bias to stand out."),
        _least(ASYMMETRIC, skew[skew.form == "D"].share_asymmetric),
        _least(NOT_PSD, definite.share_indefinite),
        _largest_deviation(
            EQUALITY,
            symmetric,
            "The exact value depends on ‖H‖_F and tr(H), see `exact` in the table; λ² n (n - 1) is its maximum "
            "over all H of spectral norm λ, attained by multiples of the identity (unsymmetrised, by H² = λ² I).",
        ),
        _largest_deviation(ISOTROPIC, symmetric[symmetric.spectrum == "isotropic"], "Draws or sizes are off."),
        _largest_ratio(BOUND, plain, "stated", "More draws will tell: the bound follows from the exact formula."),
        _largest_ratio(
            LARGEST,
            plain,
            "stated_with_largest",
            "An indefinite H can have a large norm and a small largest eigenvalue. λ must be the spectral norm.",
        ),
        judge(
            SIGMA,
            float((plain.mean_norm / plain.stated**0.5).max()),
            exact(float((plain.mean_norm / plain.stated**0.5).max()), kind=f"largest of {len(plain)} settings"),
            if_not_reproduced="It follows from Jensen's inequality and the bound above.",
        ),
    ]


def _mean(claim: Claim, values: pd.Series, why: str) -> ClaimResult:
    value = float(values.mean()) if len(values) else None
    return judge(claim, value, t_interval(values.to_numpy(), unit="settings"), if_not_reproduced=why)


def _least(claim: Claim, shares: pd.Series) -> ClaimResult:
    value = float(shares.min())
    why = "Only a direction that is an eigenvector gives a symmetric and semi-definite D."
    return judge(claim, value, exact(value, kind=f"least of {len(shares)} settings"), if_not_reproduced=why)


def _largest_deviation(claim: Claim, table: pd.DataFrame, why: str) -> ClaimResult:
    deviations = (table.measured / table.stated - 1).abs()
    return _with_error(claim, table, deviations, table.stderr / table.stated, why)


def _largest_ratio(claim: Claim, table: pd.DataFrame, column: str, why: str) -> ClaimResult:
    return _with_error(claim, table, table.measured / table[column], table.stderr / table[column], why)


def _with_error(claim: Claim, table: pd.DataFrame, values: pd.Series, errors: pd.Series, why: str) -> ClaimResult:
    """Judge the largest value with the Monte-Carlo error of its own setting."""
    where = int(values.to_numpy().argmax())
    row, value, half = table.iloc[where], float(values.iloc[where]), 1.96 * float(errors.iloc[where])
    if not math.isfinite(value):
        raise ValueError(
            f"claim {claim.id}: the largest value is not finite; look at {row.spectrum}, n = {row.n}."
        )
    kind = f"95 % of Monte Carlo, {row.spectrum}, n = {row.n}, {row.form}"
    interval = Interval(value - half, value + half, kind, int(row.num_draws))
    return judge(claim, value, interval, if_not_reproduced=f"{why} Largest: {row.spectrum}, n = {row.n}.")
