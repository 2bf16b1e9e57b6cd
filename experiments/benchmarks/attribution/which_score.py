"""Which score for which question: how well it agrees with what was measured, and its cost in training runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from experiments.benchmarks.attribution.methods import INFLUENCE, PBRF

MAX_GRADIENT = 0.1  # of the gradient at the start; with more of it left a PBRF is not one
PBRF_QUESTION = "pbrf"

QUESTIONS = {
    "lds": "what retraining on a half does, in the same order of batches",
    "lds_other": "what retraining on a half does, in other orders",
    PBRF_QUESTION: "what the PBRF says that leaving one example out does",
    "removal_1": "whose removal raises a test loss, top 1 %",
    "removal_5": "whose removal raises a test loss, top 5 %",
}
BY_LDS, BY_PAPER = "damping by LDS", "damping of the PBRF paper"


def not_minimised(row: pd.Series) -> str:
    """Return why a row of the table is no PBRF, or nothing."""
    left = row.get("gradient_norm")
    if left is None or pd.isna(left) or left <= MAX_GRADIENT:
        return ""
    return f"not at its minimum: {left:.2g} of the gradient is left (median), at most {MAX_GRADIENT:g} may be"


def which_score(table: pd.DataFrame, timing: pd.DataFrame, paper_damping: float) -> pd.DataFrame:
    """Return one row for each task, question and score, the best score first.

    Columns: `agreement` with 95 % interval: Spearman's correlation over halves (LDS) or, with the PBRF at the
    damping of the run's length, over examples, or for removals the mean rise of the test loss, that of random
    removals among them; `trainings`: what the score costs, in trainings of the network; `as good as the best`:
    whether the agreement is above the lower end of the best one's interval; `out of reach`: why a row is not
    ranked. Where the PBRF was not minimised, the question about it has no answer, and scores by it are not ranked.
    A score with a grid of dampings stands with the one whose LDS is highest, chosen by trying: its cost is that of
    the whole grid, and of the halves that choose. Influence stands with the damping of the PBRF paper, too, where
    the grid has it; the rows without a damping have none, or that of the run's length.

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
                scores = _scores(own, costs, paper_damping)
                truth = own[own.method == PBRF]
                unknown = not_minimised(truth.iloc[0]) if name == PBRF_QUESTION and len(truth) else ""
                if unknown:
                    rows.append({"task": task, "question": question, "out of reach": f"the PBRF is {unknown}"})
                else:
                    rows += _ranked(str(task), question, name, scores)
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
    """Return the rows of one question, the best first; scores for which it was not measured are left out.

    Those that are not what they are called stand last, with the reason.
    """
    measured = [(not_minimised(entry[1]), *entry) for entry in scores if pd.notna(entry[1][column])]
    measured.sort(key=lambda entry: (bool(entry[0]), -float(entry[2][column])))
    if not measured:
        return []
    best = measured[0][2]
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
            "as good as the best": None if reason else bool(row[column] >= bound),
            "out of reach": reason,
        }
        for reason, score, row, trainings in measured
    ]
