"""Theorem 1 and Corollary 1: their bounds, requirements and misprints."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, reporting
from experiments.shared.worst_case import judge_row, largest

SETTING = ["problem", "damping_ratio"]


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each claim where it fares worst."""
    errors, settings, stationary = computed["table"], computed["settings"], computed["stationary"]
    covered = errors[errors.delta > 0]
    admitted = covered.merge(settings[[*SETTING, "corollary"]], on=SETTING)
    admitted = admitted[admitted.batch_size >= admitted.corollary]
    known = settings[settings.exact.notna()]
    limits = stationary[np.isfinite(stationary.error)]
    update = stationary.single_update / (stationary.printed * stationary.constant.clip(lower=1))
    constants = ", ".join(
        f"{row.constant:.3g} ({row.problem})" for row in settings.drop_duplicates("problem").itertuples()
    )
    return [
        _mean(claims.claim("mean-bound"), errors),
        _measured(
            claims.claim("second-moment-bound"),
            covered,
            "error",
            "theorem",
            "From u_0 = 0 the cross term of the proof is negative where H and E H_t² commute; here they do not.",
        ),
        _any_start(claims.claim("second-moment-bound-any-start"), computed["start"]),
        _measured(
            claims.claim("printed-bound"),
            admitted,
            "error",
            "printed_generous",
            "(10) lacks δ⁻¹, about 1 / (2ηλ): its second term is the variance of one update, and the limit adds "
            "up many. On the trained network the slack of its other steps is larger than that factor here; with "
            "one example's gradient in the task of B.4, where C.1 is nearly tight, it is not.",
        ),
        _uniform(claims.claim("printed-bound-uniform"), limits),
        _exact(claims.claim("single-update"), stationary, update, "Condition C.1 with the measured C gives it."),
        _scaling(claims.claim("batch-scaling"), limits.merge(settings[[*SETTING, "exact"]], on=SETTING)),
        _exact(
            claims.claim("batch-requirement"), known, known.exact / known.corollary, "It follows from Theorem 1."
        ),
        _exact(
            claims.claim("constant-two"),
            known,
            known.exact / known.recipe,
            f"C, measured exactly as the smallest constant of condition C.1, is {constants}: the curvature of a "
            "trained network sits in few examples.",
        ),
        _exact(
            claims.claim("proof-inequality"),
            settings,
            settings.single_example,
            "A misprint for <=: with it the condition says |B| >= C tr(H) / λmax, as in the corollary.",
        ),
        *_by_importance(computed, claims),
    ]


def _by_importance(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge our own statement: C is 1 once examples are drawn in proportion to tr(G_i)."""
    constant, requirement = (claims.claim(f"importance-{name}") for name in ("constant", "requirement"))
    table = computed.get("importance", pd.DataFrame())
    if table.empty:
        reason = "All examples have one trace, or these tables are from before importance sampling."
        return [out_of_reach(constant, reason), out_of_reach(requirement, reason)]
    uniform = ", ".join(
        f"{row.constant_uniform:.3g} ({row.problem})" for row in table.drop_duplicates("problem").itertuples()
    )
    known = table[table.exact.notna()]
    return [
        _exact(constant, table, table.constant, f"By uniform sampling C is {uniform}."),
        _exact(requirement, known, known.exact / known.corollary, "It follows from C = 1."),
    ]


def _mean(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    values = table.mean_norm / table.mean_bound
    row = table.iloc[largest(values)]
    why = "Only an η above 1 / (λmax + λ), or a G with a negative eigenvalue, breaks it."
    return judge_row(claim, table, values, largest(values), f"{row.problem}, t = {row.step}", why)


def _measured(claim: Claim, table: pd.DataFrame, column: str, bound: str, why: str) -> ClaimResult:
    """Judge the largest upper end of a measured column over its bound."""
    if table.empty:
        return out_of_reach(claim, "No batch size of this preset is admitted.")
    values, stderrs = table[column] / table[bound], table[f"{column}_stderr"] / table[bound]
    place = largest(values + 1.96 * stderrs)
    row = table.iloc[place]
    kind = f"{row.problem}, |B| = {row.batch_size}, t = {row.step}"
    return judge_row(claim, table, values, place, kind, why, stderrs=stderrs)


def _exact(claim: Claim, table: pd.DataFrame, values: pd.Series, why: str) -> ClaimResult:
    if values.empty:
        return out_of_reach(claim, "No problem of this preset has exact second moments.")
    row = table.iloc[largest(values)]
    why = f"Largest: {row.problem}, damping {row.damping_ratio:.3g} λmax. {why}"
    return judge_row(claim, table, values, largest(values), f"largest of {len(values)} settings", why)


def _any_start(claim: Claim, start: pd.DataFrame) -> ClaimResult:
    ratios = start.exact / start.theorem
    place = largest(ratios)
    why = (
        f"At t = {start.step.iloc[place]} the exact error is {ratios.iloc[place]:.3f} times the bound. B.1 takes "
        "η² (E H_t² - H²) <= η(H + λ) - δ for granted, which (9) does not give, so the cross term is larger than "
        "it says. 2 (1 - δ)^t ‖u_0 - u*‖² + 2 δ⁻¹ η² Δ holds for every start (here at most "
        f"{float((start.exact / start.corrected).max()):.2f} of it): two terms, no cross term."
    )
    values, stderrs = start.error / start.theorem, start.error_stderr / start.theorem
    return judge_row(claim, start, values, place, f"t = {start.step.iloc[place]}", why, stderrs=stderrs)


def _uniform(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    slopes = {}
    for problem, own in limits[limits.batch_size == 100].groupby("problem", sort=False):
        if own.inverse_delta.nunique() > 1:
            first, last = own.iloc[largest(-own.inverse_delta)], own.iloc[largest(own.inverse_delta)]
            growth = np.log((last.error / last.printed) / (first.error / first.printed))
            slopes[problem] = float(growth / np.log(last.inverse_delta / first.inverse_delta))
    if not slopes:
        return out_of_reach(claim, "No problem has limits at |B| = 100 for two dampings.")
    value = max(slopes.values())
    shown = ", ".join(f"{problem} {slope:.2f}" for problem, slope in slopes.items())
    why = f"Slopes: {shown}; δ⁻¹, which Theorem 1 has and (10) drops, would give up to 1."
    interval = exact(value, kind=f"exact, largest of {len(slopes)} problems")
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


def _scaling(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    slopes = [
        float(np.polyfit(np.log(own.batch_size), np.log(own.error), 1)[0])
        for _, own in limits[limits.batch_size >= 2 * limits.exact].groupby(SETTING)
        if len(own) > 1
    ]
    if not slopes:
        return out_of_reach(claim, "Too few batch sizes above the threshold.")
    value = max(slopes, key=lambda slope: abs(slope + 1))
    why = "Close to the threshold the error is larger than its leading order in 1 / |B|."
    interval = exact(value, kind=f"exact, farthest of {len(slopes)} settings")
    return reporting.judge(claim, value, interval, if_not_reproduced=why)
