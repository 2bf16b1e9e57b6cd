"""Differences between racers seed by seed: runs of one seed share their start and their batches."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, t_interval


def of_racer(table: pd.DataFrame, racer: str, column: str, rank: int | None = None) -> pd.Series:
    """Return a racer's results by seed, of one rank or, with None, the mean over its ranks; empty without it.

    Args:
        table: final runs of one task.
        racer: its name.
        column: what of.
        rank: of a racer with ranks.
    """
    own = table[table.racer == racer]
    own = own if rank is None else own[own["rank"] == rank]
    return own.groupby("seed")[column].mean()


def best_of(table: pd.DataFrame, racers: list[str], *, chosen_by: str = "accuracy") -> tuple[str, int | None]:
    """Return the racer and rank that the validation set prefers, by the mean over seeds.

    Args:
        table: final runs of one task.
        racers: among which.
        chosen_by: "accuracy", of validation, or a loss, of which the smallest is best.
    """
    own = table[table.racer.isin(racers)]
    means = own.groupby(["racer", "rank"], dropna=False)[chosen_by].mean()
    place = int(means.argmax() if chosen_by == "accuracy" else means.argmin())
    racer, rank = means.index.tolist()[place]
    return str(racer), None if np.isnan(rank) else int(rank)


def judge_difference(
    claim: Claim, first: pd.Series, second: pd.Series, why: str, *, comparisons: int = 1
) -> ClaimResult:
    """Judge the mean over seeds of first - second, with its t interval.

    Args:
        claim: the claim.
        first: by seed.
        second: by seed.
        why: what explains a failure.
        comparisons: of how many this one is the extreme; the interval holds for all at once (Bonferroni).
    """
    difference = (first - second).dropna().to_numpy()
    if not len(difference):
        return out_of_reach(claim, "One of the two takes no part in this preset, or is not installed.")
    return judge(
        claim,
        float(difference.mean()),
        t_interval(difference, confidence=1 - 0.05 / comparisons),
        if_not_reproduced=why,
    )
