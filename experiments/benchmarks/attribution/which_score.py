"""Which score for which question: how well it agrees with what was measured, and its cost in training runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from experiments.benchmarks.attribution.methods import INFLUENCE

QUESTIONS = {
    "lds": "what retraining on a half does, in the same order of batches",
    "lds_other": "what retraining on a half does, in other orders",
    "pbrf": "what the PBRF says that leaving one example out does",
    "removal_1": "whose removal raises a test loss, top 1 %",
    "removal_5": "whose removal raises a test loss, top 5 %",
}
BY_LDS, BY_PAPER = "damping by LDS", "damping of the PBRF paper"


def which_score(table: pd.DataFrame, timing: pd.DataFrame, paper_damping: float) -> pd.DataFrame:
    """Return one row for each task, question and score, the best score first.

    Columns: `agreement` with 95 % interval: Spearman's correlation over halves (LDS) or, with the PBRF at the
    damping of the run's length, over examples, or for removals the mean rise of the test loss, that of random
    removals among them; `trainings`: what the score costs, in trainings of the network; `as good as the best`:
    whether the agreement is above the lower end of the best one's interval. A score with a grid of dampings stands
    with the one whose LDS is highest, chosen by trying: its cost is that of the whole grid, and of the halves that
    choose. Influence stands with the damping of the PBRF paper, too, where the grid has it; the rows without a
    damping have none, or that of the run's length.

    Args:
        table: of `compute`.
        timing: likewise.
        paper_damping: Bae et al. 2022, Sec. C.3.
    """
    done = table[table.status == "done"]
    rows: list[dict[str, Any]] = []
    for task, own in done.groupby("task", sort=False):
        costs = timing[timing.task == task]
        for name, question in QUESTIONS.items():
            if name in own:
                rows += _ranked(str(task), question, name, _scores(own, costs, paper_damping))
    return pd.DataFrame(rows)


def _scores(own: pd.DataFrame, costs: pd.DataFrame, paper_damping: float) -> list[tuple[str, pd.Series, float]]:
    """Return the scores of a task: name, row of the table, trainings."""
    found = []
    halves = costs[costs.method.str.endswith("halves together")].trainings.iloc[0]
    for name, rows in own.groupby("method", sort=False):
        method = str(name)
        spent = costs[costs.method == method]
        if len(rows) == 1 or rows.damping.isna().all():
            found.append((method, rows.iloc[0], float(spent.trainings.sum())))
            continue
        best = rows.loc[rows.lds == rows.lds.max()].iloc[0]
        found.append((f"{method}, {BY_LDS}", best, float(spent.trainings.sum() + halves)))
        near = rows[np.isclose(rows.damping, paper_damping)]
        if method == INFLUENCE and len(near):
            alone = spent[np.isclose(spent.damping, paper_damping)].trainings.sum()
            found.append((f"{method}, {BY_PAPER}", near.iloc[0], float(alone)))
    return found


def _ranked(
    task: str, question: str, column: str, scores: list[tuple[str, pd.Series, float]]
) -> list[dict[str, Any]]:
    """Return the rows of one question, the best first; scores for which it was not measured are left out."""
    measured = [entry for entry in scores if pd.notna(entry[1][column])]
    measured.sort(key=lambda entry: -float(entry[1][column]))
    if not measured:
        return []
    best = measured[0][1]
    bound = best[f"{column}_low"] if pd.notna(best[f"{column}_low"]) else best[column]
    return [
        {
            "task": task,
            "question": question,
            "score": score,
            "damping": row.damping,
            "agreement": row[column],
            "low": row[f"{column}_low"],
            "high": row[f"{column}_high"],
            "trainings": trainings,
            "as good as the best": bool(row[column] >= bound),
        }
        for score, row, trainings in measured
    ]
