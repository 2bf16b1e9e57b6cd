"""Table 5, claims: no gaps where all is convex; for networks, the gaps that are not errors of influence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd

from curvlab.influence.retraining import GAPS
from curvlab.lab import ClaimResult, ClaimSheet, Computed, out_of_reach
from curvlab.lab.reporting.claims import DIRECTION_ONLY, OUT_OF_REACH, REPRODUCED
from experiments.pbrf.correlation_claims import only_if
from experiments.pbrf.gap_claims import judge_over_seeds, mean_ratio
from experiments.pbrf.gap_tables import by_point

LOGISTIC = ("no-gaps", "small-against-estimate")
NETWORKS = ("answers-another-question", "influence-is-the-pbrf", "solver-reaches-it", "linearisation-small")
_WORDS = {"zero": "not measured"}
MOVED = 0.5  # of the estimate's way, below which a PBRF has hardly moved


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task over its seeds, see `judge_over_seeds`."""
    generator = np.random.default_rng(computed.config["seed"])
    table, results = computed["table"], []
    for task, own in computed["points"].groupby("task", sort=False):
        row = table[table.task == task].iloc[0]
        judge_task = _logistic if row.epochs == 0 else _network
        results += judge_task(claims, str(task), by_point(own), row, generator)
    for name in (*LOGISTIC, *NETWORKS):
        if not any(result.claim.id.startswith(f"{name}-") for result in results):
            results.append(out_of_reach(claims.claim(name, **_WORDS), "This preset has no such task."))
    return results


def share_of_errors(*gaps: np.ndarray) -> float:
    """Return the share of linearisation and solver, the last two of five, in the sum of the means."""
    means = [float(np.mean(gap)) for gap in gaps]
    return sum(means[3:]) / sum(means)


def errors_against_estimate(linearisation: np.ndarray, solver: np.ndarray, moved: np.ndarray) -> float:
    """Return both errors over how far the estimate moves the outputs, in means."""
    return mean_ratio(linearisation + solver, moved)


def _logistic(
    claims: ClaimSheet, task: str, gaps: pd.DataFrame, row: pd.Series, generator: np.random.Generator
) -> list[ClaimResult]:
    def largest(*values: np.ndarray) -> float:
        return float(max(np.mean(column) for column in values))

    def largest_against(*values: np.ndarray) -> float:
        return largest(*values[:-1]) / float(np.mean(values[-1]))

    why = (
        f"Mean gaps: {_listed(gaps)}; the estimate moves the outputs by {row.moved:.2g}. A weight of 1/N is not "
        "infinitesimal, and linearisation is exact to first order only."
    )
    columns = [*GAPS]
    return [
        judge_over_seeds(claims.claim(LOGISTIC[0], of=task), row, gaps[columns], largest, why, generator),
        judge_over_seeds(
            claims.claim(LOGISTIC[1], of=task), row, gaps[[*columns, "moved"]], largest_against, why, generator
        ),
    ]


def _network(
    claims: ClaimSheet, task: str, gaps: pd.DataFrame, row: pd.Series, generator: np.random.Generator
) -> list[ClaimResult]:
    nothing = gaps.assign(solver=gaps["moved by linearised"])
    share = share_of_errors(*(nothing[gap].to_numpy() for gap in GAPS))
    zero = f"{share:.2g}"
    state = (
        f"At θ^s the gradient norm is {row['gradient norm']:.2g}, the training loss {row['train loss']:.3g} "
        f"(constant outputs: {row['constant loss']:.3g}). Mean gaps: {_listed(gaps)}; the estimate moves the "
        f"outputs by {row.moved:.2g}, the PBRF by {row['moved by PBRF']:.2g}, its linearisation by "
        f"{row['moved by linearised']:.2g}. An influence of zero would have a share of {zero}."
    )
    few = (
        f"{row.epochs / 2:g} epochs at a lower learning rate end before the directions of small curvature have "
        "moved: a small gap is not a solved problem."
    )
    statistics: dict[str, tuple[list[str], Callable[..., float], str]] = {
        "answers-another-question": ([*GAPS], share_of_errors, state),
        "influence-is-the-pbrf": (["linearisation", "solver", "moved"], errors_against_estimate, f"{state} {few}"),
        "solver-reaches-it": (["solver", "moved"], mean_ratio, f"{state} {few}"),
        "linearisation-small": (["linearisation", "moved by PBRF"], mean_ratio, state),
    }
    judged = {
        name: judge_over_seeds(claims.claim(name, of=task, zero=zero), row, gaps[columns], measure, why, generator)
        for name, (columns, measure, why) in statistics.items()
    }
    return [_where_it_says_something(name, found, judged, row, share) for name, found in judged.items()]


def _where_it_says_something(
    name: str, found: ClaimResult, judged: dict[str, ClaimResult], row: pd.Series, zero: float
) -> ClaimResult:
    """Return the result, out of reach where an influence of zero, or a PBRF that has hardly moved, would do."""
    own = found.claim.criterion
    if found.verdict not in (REPRODUCED, DIRECTION_ONLY):
        return found
    if name == "answers-another-question" and own.at_most is not None and zero <= own.at_most:
        reason = f"An influence of zero would do as well ({zero:.2g})."
        return only_if(found, judged["influence-is-the-pbrf"], reason)
    if name == "linearisation-small" and row["moved by PBRF"] < MOVED * row.moved:
        reason = (
            f"The PBRF has moved the outputs by {row['moved by PBRF'] / row.moved:.2g} of what the estimate does: "
            "so early anything is linear."
        )
        return replace(found, verdict=OUT_OF_REACH, explanation=f"{reason} {found.explanation}")
    return found


def _listed(gaps: pd.DataFrame) -> str:
    return ", ".join(f"{gap} {gaps[gap].mean():.2g}" for gap in GAPS)
