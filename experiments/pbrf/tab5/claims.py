"""Table 5, claims: no gaps where all is convex; for networks, the gaps that are not errors of influence."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.influence.responses import GAPS
from curvlab.reporting import ClaimResult, ClaimSheet, bootstrap_interval, out_of_reach
from curvlab.reporting import judge as judged
from experiments.pbrf.gap_tables import by_point
from experiments.target import Computed

NETWORKS = ("answers-another-question", "solver-reaches-it", "linearisation-smallest")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; intervals are bootstraps over points (and seeds, where there are several)."""
    generator = np.random.default_rng(computed.config["seed"])
    table, results = computed["table"], []
    for task, own in computed["points"].groupby("task", sort=False):
        row = table[table.task == task].iloc[0]
        if row.epochs == 0:
            results += _logistic(claims, str(task), own, row, generator)
        else:
            results += _network(claims, str(task), own, row, generator)
    for name in ("no-gaps", *NETWORKS):
        if not any(result.claim.id.startswith(name) for result in results):
            results.append(out_of_reach(claims.claim(name), "This preset has no such task."))
    return results


def _logistic(
    claims: ClaimSheet, task: str, own: pd.DataFrame, row: pd.Series, generator: np.random.Generator
) -> list[ClaimResult]:
    gaps = by_point(own)
    columns = tuple(gaps[gap].to_numpy() for gap in GAPS)

    def largest(*values: np.ndarray) -> float:
        return float(max(np.mean(column) for column in values))

    return [
        judged(
            claims.claim("no-gaps", of=task),
            largest(*columns),
            bootstrap_interval(columns, largest, generator=generator),
            if_not_reproduced=f"Mean gaps: {_listed(gaps)}; the estimate moves the outputs by {row.moved:.2g}. A "
            "weight of 1/N is not infinitesimal, and linearisation is exact to first order only.",
        )
    ]


def _network(
    claims: ClaimSheet, task: str, own: pd.DataFrame, row: pd.Series, generator: np.random.Generator
) -> list[ClaimResult]:
    gaps = by_point(own)
    columns = tuple(gaps[gap].to_numpy() for gap in GAPS)

    def share(*values: np.ndarray) -> float:
        means = [float(np.mean(column)) for column in values]
        return sum(means[3:]) / sum(means)

    def ratio(of: np.ndarray, by: np.ndarray) -> float:
        return float(np.mean(of) / np.mean(by))

    linearisation, solver = (columns[3], columns[0]), (columns[4], gaps["moved"].to_numpy())
    state = f"At θ^s the gradient norm is {row['gradient norm']:.2g}, the training loss {row['train loss']:.3g}."
    return [
        judged(
            claims.claim("answers-another-question", of=task),
            share(*columns),
            bootstrap_interval(columns, share, generator=generator),
            if_not_reproduced=f"{state} Mean gaps: {_listed(gaps)}.",
        ),
        judged(
            claims.claim("linearisation-smallest", of=task),
            ratio(*linearisation),
            bootstrap_interval(linearisation, ratio, generator=generator),
            if_not_reproduced=f"{state} Mean gaps: {_listed(gaps)}.",
        ),
        judged(
            claims.claim("solver-reaches-it", of=task),
            ratio(*solver),
            bootstrap_interval(solver, ratio, generator=generator),
            if_not_reproduced=f"{state} {row.epochs / 2:.0f} epochs at a lower learning rate end before the "
            "directions of small curvature have moved: a small gap is not a solved problem.",
        ),
    ]


def _listed(gaps: pd.DataFrame) -> str:
    return ", ".join(f"{gap} {gaps[gap].mean():.2g}" for gap in GAPS)
