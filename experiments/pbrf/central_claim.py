"""The claims of tab6 and tab7: influence answers what the PBRF asks, not what retraining asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from curvlab.lab import ClaimResult, ClaimSheet, Computed, out_of_reach
from experiments.pbrf.carried_on import MAX_DISTANCE, REACHED
from experiments.pbrf.correlation_claims import (
    Tables,
    judge_correlation,
    judge_difference,
    only_if,
    over_seeds,
    seed_values,
    solved,
)

RETRAINED = ("cold", "warm")
EXPLAINING = {
    "carried_on": "carried on at the undivided rate, all points",
    "minimum": "those at their minimum",
    "small_weight": "at the minimum for a small weight",
    "linearised": "linearised, by SGD",
    "linearised_minimum": "at the linearised minimum",
}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; the table is of one curvature. The file says which of the claims the table has."""
    tables = dict(computed)
    (curvature,) = tables["table"].curvature.unique()
    return [
        result
        for task in tables["table"].task.unique()
        for result in _judge_task(tables, claims, str(task), str(curvature))
    ]


def _judge_task(computed: Tables, claims: ClaimSheet, task: str, curvature: str) -> list[ClaimResult]:
    why = explained(computed, task, curvature)
    results = []
    for name, coefficient in (("pbrf", "pearson"), ("pbrf-ranks", "spearman")):
        claim = claims.claim(name, of=task)
        found = judge_correlation(claim, computed, task, curvature, "proximal_bregman", coefficient)
        results.append(_with(found, why))
    for response in RETRAINED:
        claim = claims.claim(f"above-{response}", of=task)
        pair = ("proximal_bregman", response)
        results.append(judge_difference(claim, computed, task, curvature, pair, "pearson"))
        claim = claims.claim(response, of=task)
        own = judge_correlation(claim, computed, task, curvature, response, "pearson")
        results.append(_if_pbrf(own, results[0]))
    for name, response in (("minimum", "minimum"), ("small-weight", "small_weight")):
        if name in claims.entries:
            results.append(_judge_minimum(computed, claims, task, curvature, name, response))
    return results


def explained(computed: Tables, task: str, curvature: str) -> str:
    """Say what the PBRF gives when it is carried on, and where its minimum is."""
    parts = []
    for response, text in EXPLAINING.items():
        values = seed_values(computed, task, curvature, response, "pearson")
        if len(values):
            parts.append(f"{text}: {values.mean():.2f}")
    return f"The PBRF otherwise (Pearson, over test examples): {'; '.join(parts)}. {ends_text(computed, task)}"


def ends_text(computed: Tables, task: str) -> str:
    """Say how many points have a minimum for a weight of 1/N."""
    points = computed["points"]
    own = points[points.task == task]
    norms = own["carried_on gradient norm"].to_numpy()
    if not np.isfinite(norms).any():
        return "The PBRF was not carried on at this preset."
    distance, fall = own["carried_on distance"].to_numpy(), own["carried_on fall"].to_numpy()
    return (
        f"Of {len(own)} points carried on for a weight of 1/N ({own['weight over damping'].iloc[0]:.2g} times the "
        f"damping), {int((norms <= REACHED).sum())} came to a gradient of at most {REACHED:g} of the first. They "
        f"ended at {np.nanmedian(distance):.2g} times the distance of their influence estimates (median; "
        f"{int((distance > MAX_DISTANCE).sum())} beyond {MAX_DISTANCE:g}), the objective down by "
        f"{np.nanmedian(fall):.2g} times what its linearisation can fall. With linear outputs and squared error "
        "both would be 1/(1 - h), h the leverage of the point: only their ratio speaks of more than that "
        f"({np.nanmedian(fall / distance):.2g})."
    )


def _judge_minimum(  # noqa: PLR0917
    computed: Tables, claims: ClaimSheet, task: str, curvature: str, name: str, response: str
) -> ClaimResult:
    claim = claims.claim(name, of=task)
    values = seed_values(computed, task, curvature, response, "pearson")
    seeds = computed["networks"].query("task == @task").seed.nunique()
    came_from = "carried_on" if response == "minimum" else response
    norms = computed["points"].query("task == @task")[f"{came_from} gradient norm"]
    if not len(values) and not np.isfinite(norms).any():
        return out_of_reach(claim, "Not computed at this preset.")
    if len(values) < seeds:
        reason = (
            f"Points at their minimum in {len(values)} of {seeds} seeds. {explained(computed, task, curvature)}"
        )
        return out_of_reach(claim, reason)
    why = f"{explained(computed, task, curvature)} {solved(computed, task, curvature)}"
    return over_seeds(claim, computed, task, curvature, values, why)


def _if_pbrf(result: ClaimResult, pbrf: ClaimResult) -> ClaimResult:
    return only_if(
        result,
        pbrf,
        "Influence does not predict the PBRF as claimed (first claim): a small correlation says little.",
    )


def _with(result: ClaimResult, why: str) -> ClaimResult:
    return replace(result, explanation=f"{result.explanation} {why}")
