"""Table 4, claims: what rank, decay and damping do to the smallest training loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact
from curvlab.lab import judge as judge_claim
from experiments.ginger.printed import sensitivity
from experiments.ginger.race.sensitivity import named_cell
from experiments.ginger.race.variation import GRID, judge_dampings, judge_variation

LOSS = "log_loss"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task, and the printed table; intervals are over seeds."""
    printed = np.log10(sensitivity("Table 4").min_train_loss)
    width = float(printed.max() - printed.min())
    results = [
        judge_claim(
            claims.claim("printed-insensitive"),
            width,
            exact(width, kind="printed"),
            if_not_reproduced=f"The printed losses differ by a factor of {10**width:.1f}.",
        )
    ]
    table = computed["table"]
    for task, own in table.assign(**{LOSS: np.log10(table.min_train_loss)}).groupby("task", sort=False):
        results += [
            _insensitive(claims.claim("insensitive-loss", of=str(task)), own[own.sweep == "grid"]),
            _damping(claims.claim("damping-decides-loss", of=str(task)), own),
        ]
    return results


def _insensitive(claim: Claim, grid: pd.DataFrame) -> ClaimResult:
    means = grid.groupby(GRID)[LOSS].mean()
    low, high = (named_cell(place) for place in (means.idxmin(), means.idxmax()))
    ends = [10 ** means.min(), 10 ** means.max()]
    why = f"Geometric means over seeds lie from {ends[0]:.2g} ({low}) to {ends[1]:.2g} nats ({high})."
    return judge_variation(claim, grid, LOSS, why)


def _damping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    means = table[table.sweep == "damping"].groupby("damping")[LOSS].mean()
    by_damping = ", ".join(f"{10**value:.2g} nats at damping {damping:g}" for damping, value in means.items())
    return judge_dampings(claim, table, LOSS, f"Geometric means: {by_damping}.")
