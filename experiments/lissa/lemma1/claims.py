"""Lemma 1: what it says, and what its proof rests on."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach
from experiments.shared.worst_case import farthest_ratio, judge_row, largest, smallest


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each claim where it fares worst."""
    errors, limits, growth = computed["table"], computed["thresholds"], computed["growth"]
    last = errors[errors.step == errors.step.max()]
    return [
        _equality(claims.claim("condition-equality"), limits),
        _mean(claims.claim("mean-converges"), last[last.role == "below"]),
        _diverges(claims.claim("second-moment-diverges"), last[(last.role == "half") & (last.start == "growing")]),
        _least_radius(claims.claim("eigenvalue-suffices"), limits),
        _least_radius(claims.claim("eigenvalue-suffices-flat"), limits[limits.spectrum == "flat"]),
        _threshold(claims.claim("threshold"), limits),
        _powers(claims.claim("powers-of-r"), last[last.start == "growing"], float(errors.z.std())),
        _samplewise(claims.claim("samplewise"), growth[growth.radius > 1]),
    ]


def _case(table: pd.DataFrame, place: int) -> str:
    row = table.iloc[place]
    batch = f", |B| = {row.batch_size}" if "role" in table else ""
    return f"{row.spectrum}, {row['size']}{batch}"


def _equality(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    place = smallest(limits.constant)
    why = "It is (tr(H) H - H²) / |B|: C.1 holds with C = 1, but not tightly."
    return judge_row(claim, limits, limits.constant, place, f"least of {len(limits)}: {_case(limits, place)}", why)


def _mean(claim: Claim, own: pd.DataFrame) -> ClaimResult:
    ratios = own.mean_norm / own.mean_bound
    place = largest(ratios)
    far = ((own["mean"] - own.mean_exact).abs() / own.mean_stderr).max()
    why = f"The trials' means are at most {far:.1f} standard errors from the recursion's."
    return judge_row(claim, own, ratios, place, _case(own, place), why)


def _diverges(claim: Claim, own: pd.DataFrame) -> ClaimResult:
    if own.empty:
        return out_of_reach(claim, "No spectrum of this preset has half a threshold.")
    place = smallest(own.second_moment - 1.96 * own.second_moment_stderr)
    why = "The growth is carried by trials that were not drawn."
    return judge_row(
        claim, own, own.second_moment, place, _case(own, place), why, stderrs=own.second_moment_stderr
    )


def _least_radius(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    if limits.empty:
        return out_of_reach(claim, "No flat spectrum in this run.")
    suffix = min(("", "_largest"), key=lambda s: float(limits["radius" + s].min()))
    values = limits["radius" + suffix]
    row = limits.iloc[smallest(values)]
    why = (
        f"Least: {row.spectrum}, {row['size']} eigenvalues, damping {row.damping:.3g}, |B| = "
        f"{row['batch_size' + suffix]}, where that eigenvalue is {row['printed_radius' + suffix]:.4f}. The matrix "
        "holds the row sums of the true recursion's, so its largest eigenvalue bounds the spectral radius from "
        "above: below 1 it suffices for convergence; above 1 it does not suffice for divergence."
    )
    return judge_row(claim, limits, values, smallest(values), f"least of {2 * len(limits)} settings", why)


def _threshold(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    ratios = limits.exact_largest / limits.printed
    row = limits.iloc[smallest(ratios)]
    why = (
        f"Least: {row.spectrum}, {row['size']} eigenvalues, damping {row.damping:.3g}: diverging up to |B| = "
        f"{row.exact_largest:.3g}, printed {row.printed:.3g}. A flat spectrum loses only the H² that the equality "
        "in C.1 forgets; others up to a factor of 2 for small damping, and more where most of the trace lies in "
        "eigenvalues below the damping. A larger batch than needed is the safe side."
    )
    return judge_row(claim, limits, ratios, smallest(ratios), f"least of {len(limits)} settings", why)


def _powers(claim: Claim, own: pd.DataFrame, spread: float) -> ClaimResult:
    ratios = own.second_moment / own.second_moment_printed
    place = farthest_ratio(ratios)
    why = (
        f"Farthest: {_case(own, place)}. The proof takes E H_t R H_t for (E H_t²) R. From the recursion derived "
        "here instead the measured values differ by noise: (measured - exact) / stderr has a standard deviation "
        f"of {spread:.2f} over the rows of table.csv."
    )
    stderrs = own.second_moment_stderr / own.second_moment_printed
    return judge_row(claim, own, ratios, place, _case(own, place), why, stderrs=stderrs)


def _samplewise(claim: Claim, own: pd.DataFrame) -> ClaimResult:
    place = smallest(own.growth)
    why = (
        f"Least: {_case(own, place)}, whose second moment grows (radius {own.radius.iloc[place]:.4f}) although "
        "almost every trial converges: rare trials carry it. Just below the threshold the lemma's 'not "
        "samplewise' is too strong; further below, trials do diverge (growth.csv)."
    )
    return judge_row(claim, own, own.growth, place, _case(own, place), why, stderrs=own.growth_stderr)
