"""Table 3, claims: neither rank nor decay matters much, and what damping and clipping do."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach
from experiments.ginger.race.paired import judge_difference
from experiments.ginger.race.sensitivity import named_cell
from experiments.ginger.race.variation import GRID, judge_dampings, judge_variation

ACCURACY = "test_accuracy"
DEFAULT_DECAY = 0.99


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task; intervals are over seeds."""
    results = []
    for task, table in computed["table"].groupby("task", sort=False):
        grid = table[table.sweep == "grid"]
        results += [
            _insensitive(claims.claim("insensitive", of=str(task)), grid),
            _tuned(claims.claim("tuned-above-default", of=str(task)), grid, int(computed.config["tuned_rank"])),
            _damping(claims.claim("damping-decides", of=str(task)), table),
            _clipping(claims.claim("small-damping-needs-clipping", of=str(task)), table),
        ]
    return results


def _insensitive(claim: Claim, grid: pd.DataFrame) -> ClaimResult:
    means = grid.groupby(GRID)[ACCURACY].mean()
    low, high = (named_cell(place) for place in (means.idxmin(), means.idxmax()))
    ends = [100 * means.min(), 100 * means.max()]
    why = f"The cells' means over seeds lie from {ends[0]:.2f} % ({low}) to {ends[1]:.2f} % ({high})."
    return judge_variation(claim, grid, ACCURACY, why)


def _tuned(claim: Claim, grid: pd.DataFrame, rank: int) -> ClaimResult:
    cells = {place: own.set_index("seed") for place, own in grid.groupby(GRID)}
    if (DEFAULT_DECAY, rank) not in cells:
        return out_of_reach(claim, f"The grid lacks decay {DEFAULT_DECAY} with rank {rank}.")
    means = grid.groupby(GRID).accuracy.mean().drop((DEFAULT_DECAY, rank))
    if means.empty:
        return out_of_reach(claim, "The grid has no other cell.")
    best = means.index.tolist()[int(means.argmax())]
    why = f"Of the others validation prefers decay {best[0]:g} with rank {best[1]:.0f}."
    return judge_difference(claim, cells[best][ACCURACY], cells[DEFAULT_DECAY, rank][ACCURACY], why)


def _damping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    means = table[table.sweep == "damping"].groupby("damping")[ACCURACY].mean()
    by_damping = ", ".join(f"{100 * value:.2f} % at {damping:g}" for damping, value in means.items())
    return judge_dampings(claim, table, ACCURACY, f"Over dampings: {by_damping}.")


def _clipping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    smallest = table[table.damping == table.damping.min()]
    plain, clipped = (smallest[smallest.sweep == sweep] for sweep in ("damping", "damping, clipped"))
    if plain.empty or clipped.empty:
        return out_of_reach(claim, "The smallest damping was not tried with and without clipping.")
    first, second = (own.groupby("seed")[ACCURACY].mean() for own in (clipped, plain))
    why = (
        f"At {smallest.damping.iloc[0]:g}: {100 * first.mean():.2f} % with clipping, {100 * second.mean():.2f} % "
        f"without (at most {100 * plain[ACCURACY].max():.2f} % in a seed), where {plain.diverged.sum()} of "
        f"{len(plain)} seeds diverged."
    )
    return judge_difference(claim, first, second, why)
