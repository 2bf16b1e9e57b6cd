"""Theorem 1 and Corollary 1, claims."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, exact, judge

THEOREM = "Klochkov & Liu 2024, Theorem 1"
COROLLARY = "Klochkov & Liu 2024, Corollary 1"

MEAN = Claim(
    id="mean-bound",
    statement="For η < 1 / (λmax + λ), ‖E u_t - u*‖ is at most (1 - λη)^t ‖u_0 - u*‖.",
    source=THEOREM,
    paper_value="at most 1",
    measure="⟨mean of u_t - u*, u_0 - u*⟩ / ‖u_0 - u*‖² over (1 - λη)^t, largest over problems, |B| that "
    "condition (9) admits, and t <= 1 / (ηλ), beyond which the mean drowns in the noise of the trials",
    criterion=Criterion(at_most=1.0),
)
BOUND = Claim(
    id="second-moment-bound",
    statement="Where (9) holds, E‖u_t - u*‖² <= (1 - δ)^t (2‖u_0 - u*‖² + ‖u*‖²) + δ⁻¹ η² Δ, from u_0 = 0.",
    source=THEOREM,
    paper_value="at most 1",
    measure="measured error over the bound (best δ), largest over problems, steps and admitted |B|",
    criterion=Criterion(at_most=1.0),
)
ANY_START = Claim(
    id="second-moment-bound-any-start",
    statement="The same for every u_0.",
    source=THEOREM,
    paper_value="at most 1",
    measure="measured error over the bound, largest over steps: one parameter, one example in ten with "
    "curvature 1 and the others none, |B| = 1, η = 1, u_0 = 4",
    criterion=Criterion(at_most=1.0),
)
PRINTED = Claim(
    id="printed-bound",
    statement="For |B| >= C tr(H) / λmax the error is at most (10), whose sampling error is "
    "η² tr(H) / |B| gᵀ(H + λ)⁻¹g, up to constants.",
    source=COROLLARY + ", (10)",
    paper_value="at most 1",
    measure="measured error over (10) with the constants of its proof, 3 before the first term and C before the "
    "second, largest over problems, steps, admitted |B|",
    criterion=Criterion(at_most=1.0),
)
UNIFORM = Claim(
    id="printed-bound-uniform",
    statement="What (10) leaves out is a constant: it does not depend on the damping.",
    source=COROLLARY + ", (10)",
    paper_value=0.0,
    measure="log-log slope of (limit of the error / second term of (10)) against 1 / (2ηλ), between the largest "
    "and the smallest damping, largest over problems, |B| = 100",
    criterion=Criterion(at_most=0.1),
)
SINGLE = Claim(
    id="single-update",
    statement="The second term of (10) is (a bound of) the variance of a single update at u*.",
    source="Klochkov & Liu 2024, Sec. 3, after Corollary 1",
    paper_value="at most 1",
    measure="η² Δ over C times that term, largest over problems, dampings, |B|",
    criterion=Criterion(at_most=1 + 1e-9),
)
SCALING = Claim(
    id="batch-scaling",
    statement="The sampling error falls as 1 / |B|.",
    source="Klochkov & Liu 2024, Sec. 3, (10) and the remark on larger batches",
    paper_value=-1.0,
    measure="log-log slope of the limit of the error against |B|, least squares over |B| of at least twice the "
    "exact threshold, the farthest from -1 over problems and dampings",
    criterion=Criterion(at_least=-1.15, at_most=-0.9, direction_at_most=-0.5),
)
REQUIREMENT = Claim(
    id="batch-requirement",
    statement="With η = 1 / (λmax + λ) and |B| >= C tr(H) / λmax LiSSA converges, C measured exactly.",
    source=COROLLARY,
    paper_value="at most 1",
    measure="|B| below which the second moment diverges over C tr(H) / λmax, largest over problems and dampings",
    criterion=Criterion(at_most=1.0),
)
CONSTANT = Claim(
    id="constant-two",
    statement="C = 2 is enough: LiSSA converges with |B| = 2 tr(H) / λmax.",
    source="Klochkov & Liu 2024, Sec. 3, Table 1, footnote",
    paper_value="at most 1",
    measure="|B| below which the second moment diverges over the recommended |B|, largest over problems, dampings",
    criterion=Criterion(at_most=1.0),
)
PRINTED_CONDITION = Claim(
    id="proof-inequality",
    statement="Condition (9) holds with 1 - δ = (1 - ηλ)² when C tr(H) / |B| >= 1/η - λ, as the proof has it.",
    source="Klochkov & Liu 2024, App. B.2",
    paper_value="at most 1",
    measure="largest eigenvalue of (9)'s left side over (1 - ηλ)² for |B| = 1, where that inequality holds, "
    "largest over problems and dampings",
    criterion=Criterion(at_most=1 + 1e-9),
)


def judge_claims(
    errors: pd.DataFrame, settings: pd.DataFrame, stationary: pd.DataFrame, start: pd.DataFrame
) -> list[ClaimResult]:
    """Judge all claims from the four tables."""
    covered = errors[errors.delta > 0]
    admitted = covered.merge(settings[["problem", "damping_ratio", "corollary"]], on=["problem", "damping_ratio"])
    admitted = admitted[admitted.batch_size >= admitted.corollary]
    known = settings[settings.exact.notna()]
    limits = stationary[np.isfinite(stationary.error)]
    return [
        _worst(
            MEAN,
            covered.assign(value=covered["mean"], stderr=covered.mean_stderr)[covered.mean_bound > math.exp(-1)],
            "mean_bound",
            "The mean is known exactly, (1 - η(H + λ))^t (u_0 - u*): more trials will tell.",
        ),
        _worst(
            BOUND,
            _errors(covered),
            "theorem",
            "From u_0 = 0 the cross term of the proof is negative where H and E H_t² commute; here they do not.",
        ),
        _any_start(start),
        _worst(
            PRINTED,
            _errors(admitted),
            "printed_generous",
            "(10) lacks δ⁻¹, about 1 / (2ηλ): its second term is the variance of one update, and the limit adds "
            "up many. On the trained network the slack of its other steps is larger than that factor here; with "
            "one example's gradient in the task of B.4, where C.1 is nearly tight, it is not.",
        ),
        _uniform(limits),
        _exact(
            SINGLE,
            stationary.single_update / (stationary.printed * stationary.constant.clip(lower=1)),
            stationary,
            "Condition C.1 with the measured C gives it.",
        ),
        _scaling(limits, settings),
        _exact(REQUIREMENT, known.exact / known.corollary, known, "It follows from Theorem 1."),
        _exact(
            CONSTANT,
            known.exact / known.recipe,
            known,
            "C, measured exactly as the smallest constant of condition C.1, is "
            + ", ".join(f"{row.constant:.3g} ({row.problem})" for row in _per_problem(settings))
            + ": the curvature of a trained network sits in few examples.",
        ),
        _exact(
            PRINTED_CONDITION,
            settings.single_example,
            settings,
            "A misprint for <=: with it the condition says |B| >= C tr(H) / λmax, as in the corollary.",
        ),
    ]


def _per_problem(settings: pd.DataFrame) -> list:
    return list(settings.drop_duplicates("problem").itertuples())


def _errors(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(value=table.error, stderr=table.error_stderr)


def _worst(claim: Claim, table: pd.DataFrame, column: str, why: str) -> ClaimResult:
    """Judge the largest upper end of value / column, with the Monte-Carlo error of its own setting."""
    if table.empty:
        return judge(claim, None, None, if_not_reproduced="No batch size of this preset is admitted.")
    values, halves = table.value / table[column], 1.96 * table.stderr / table[column]
    where = _largest(values + halves)
    row, value, half = table.iloc[where], float(values.iloc[where]), float(halves.iloc[where])
    kind = f"95 % of Monte Carlo, {row.problem}, |B| = {row.batch_size}, t = {row.step}"
    interval = Interval(value - half, value + half, kind, int(row.num_trials))
    return judge(claim, value, interval, if_not_reproduced=why)


def _any_start(start: pd.DataFrame) -> ClaimResult:
    ratios, exact_ratios = start.error / start.theorem, start.exact / start.theorem
    where = _largest(exact_ratios)
    row, value = start.iloc[where], float(ratios.iloc[where])
    half = 1.96 * float(row.error_stderr / row.theorem)
    interval = Interval(value - half, value + half, "95 % of Monte Carlo", int(row.num_trials))
    return judge(
        ANY_START,
        value,
        interval,
        if_not_reproduced=f"At t = {int(row.step)} the exact error is {exact_ratios.iloc[where]:.3f} times the "
        "bound. B.1 takes η² (E H_t² - H²) <= η(H + λ) - δ for granted, which (9) does not give, so the cross "
        "term is larger than it says. 2 (1 - δ)^t ‖u_0 - u*‖² + 2 δ⁻¹ η² Δ holds for every start (here at most "
        f"{float((start.exact / start.corrected).max()):.2f} of it): two terms, no cross term.",
    )


def _exact(claim: Claim, values: pd.Series, table: pd.DataFrame, why: str) -> ClaimResult:
    if values.empty:
        return judge(claim, None, None, if_not_reproduced="No problem of this preset has exact second moments.")
    row, value = table.iloc[_largest(values)], float(values.max())
    return judge(
        claim,
        value,
        exact(value, kind=f"exact, largest of {len(values)} settings"),
        if_not_reproduced=f"Largest: {row.problem}, damping {row.damping_ratio:.3g} λmax. {why}",
    )


def _uniform(limits: pd.DataFrame) -> ClaimResult:
    slopes = {}
    for problem, own in limits[limits.batch_size == 100].groupby("problem", sort=False):
        if own.inverse_delta.nunique() > 1:
            first, last = own.iloc[_largest(-own.inverse_delta)], own.iloc[_largest(own.inverse_delta)]
            growth = np.log((last.error / last.printed) / (first.error / first.printed))
            slopes[problem] = float(growth / np.log(last.inverse_delta / first.inverse_delta))
    if not slopes:
        return judge(UNIFORM, None, None, if_not_reproduced="No problem has limits at |B| = 100 for two dampings.")
    value = max(slopes.values())
    shown = ", ".join(f"{problem} {slope:.2f}" for problem, slope in slopes.items())
    return judge(
        UNIFORM,
        value,
        exact(value, kind=f"exact, largest of {len(slopes)} problems"),
        if_not_reproduced=f"Slopes: {shown}; δ⁻¹, which Theorem 1 has and (10) drops, would give up to 1.",
    )


def _scaling(limits: pd.DataFrame, settings: pd.DataFrame) -> ClaimResult:
    table = limits.merge(settings[["problem", "damping_ratio", "exact"]], on=["problem", "damping_ratio"])
    table = table[table.batch_size >= 2 * table.exact]
    slopes = [
        float(np.polyfit(np.log(own.batch_size), np.log(own.error), 1)[0])
        for _, own in table.groupby(["problem", "damping_ratio"])
        if len(own) > 1
    ]
    if not slopes:
        return judge(SCALING, None, None, if_not_reproduced="Too few batch sizes above the threshold.")
    value = max(slopes, key=lambda slope: abs(slope + 1))
    return judge(
        SCALING,
        value,
        exact(value, kind=f"exact, farthest of {len(slopes)} settings"),
        if_not_reproduced="Close to the threshold the error is larger than its leading order in 1 / |B|.",
    )


def _largest(values: pd.Series) -> int:
    """Return the place of the largest value that is not nan."""
    return int(np.nanargmax(values.to_numpy(dtype=float)))
