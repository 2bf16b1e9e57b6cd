"""Which score for which question: how well it agrees with what was measured, and its cost in training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from curvlab.lab import Interval, bootstrap_interval
from experiments.benchmarks.attribution.methods import INFLUENCE, PBRF
from experiments.benchmarks.attribution.ranks import OTHER, SAME, lds_interval
from experiments.benchmarks.attribution.removal import RANDOM

MAX_GRADIENT = 0.1  # of the gradient at the start; with more of it left a PBRF is not one
PBRF_QUESTION = "pbrf"
RESPONSES = "PBRF of each example"  # among the `orders` of `queries`

QUESTIONS = {
    "lds": "what retraining on a half does, in the same order of batches",
    "lds_other": "what retraining on a half does, in other orders",
    PBRF_QUESTION: "what the PBRF says that leaving one example out does",
    "removal_1": "whose removal raises a test loss, top 1 %",
    "removal_5": "whose removal raises a test loss, top 5 %",
}
ORDERS = {"lds": SAME, "lds_other": OTHER, PBRF_QUESTION: RESPONSES}
BY_LDS, BY_PAPER = "damping by LDS", "damping of the PBRF paper"


def not_minimised(row: pd.Series) -> str:
    """Return why a row of the table is no PBRF, or nothing."""
    left = row.get("gradient_norm")
    if left is None or pd.isna(left) or left <= MAX_GRADIENT:
        return ""
    return f"not at its minimum: {left:.2g} of the gradient is left (median), at most {MAX_GRADIENT:g} may be"


@dataclass(frozen=True)
class _Score:
    """A score as it stands in the answer: its name, its row of the table, and its price in trainings."""

    name: str
    row: pd.Series
    trainings: float


def which_score(tables: Mapping[str, pd.DataFrame], paper_damping: float) -> pd.DataFrame:
    """Return one row for each task, question and score, the best score first.

    Columns: `agreement` with 95 % interval: Spearman's correlation over halves (LDS) or, with the PBRF at the
    damping of the run's length, over examples, or for removals the mean rise of the test loss, that of random
    removals among them; `trainings`: what the score costs, in trainings of the network; `behind`: how far below
    the best, with the 95 % interval of the paired difference, see `_behind`; `as good as the best`: whether that
    reaches 0; `out of reach`: why a row is not ranked. Where the PBRF was not minimised, the question about it has
    no answer, and scores by it are not ranked. A score with a grid of dampings stands with the one whose LDS is
    highest, chosen by trying: its cost is that of the whole grid, and of the halves that choose. Influence stands
    with the damping of the PBRF paper, too, where the grid has it; the rows without a damping have none, or that
    of the run's length.

    Args:
        tables: `table`, `timing`, `ranks`, `queries` and `removals` of `compute`.
        paper_damping: Bae et al. 2022, Sec. C.3.
    """
    done = tables["table"][tables["table"].status == "done"]
    rows: list[dict[str, Any]] = []
    for task, own in done.groupby("task", sort=False):
        of_task = {name: table[table.task == task] for name, table in tables.items()}
        scores = _scores(own, of_task["timing"], paper_damping)
        for name, question in QUESTIONS.items():
            if name in own:
                truth = own[own.method == PBRF]
                unknown = not_minimised(truth.iloc[0]) if name == PBRF_QUESTION and len(truth) else ""
                lacking = [{"out of reach": f"the PBRF is {unknown}"}] if unknown else []
                answers = lacking or _ranked(name, scores, of_task)
                rows += [{"task": task, "question": question} | row for row in answers]
    return pd.DataFrame(rows)


def _scores(own: pd.DataFrame, costs: pd.DataFrame, paper_damping: float) -> list[_Score]:
    found = []
    halves = costs[costs.method.str.endswith("halves together")].trainings.iloc[0]
    for name, rows in own.groupby("method", sort=False):
        method = str(name)
        spent = costs[costs.method == method]
        if len(rows) == 1 or rows.damping.isna().all():
            found.append(_Score(method, rows.iloc[0], float(spent.trainings.sum())))
            continue
        best = rows.loc[rows.lds == rows.lds.max()].iloc[0]
        found.append(_Score(f"{method}, {BY_LDS}", best, float(spent.trainings.sum() + halves)))
        near = rows[np.isclose(rows.damping, paper_damping)]
        if method == INFLUENCE and len(near):
            alone = spent[np.isclose(spent.damping, paper_damping)].trainings.sum()
            found.append(_Score(f"{method}, {BY_PAPER}", near.iloc[0], float(alone)))
    return found


def _ranked(column: str, scores: list[_Score], tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Return the rows of one question, the best first; scores for which it was not measured are left out.

    Those that are not what they are called stand last, with the reason.
    """
    measured = [(not_minimised(score.row), score) for score in scores if pd.notna(score.row[column])]
    measured.sort(key=lambda entry: (bool(entry[0]), -float(entry[1].row[column])))
    found = []
    for reason, score in measured:
        row = {"score": score.name, "damping": score.row.damping, "agreement": score.row[column]}
        row |= {end: score.row[f"{column}_{end}"] for end in ("low", "high")} | {"trainings": score.trainings}
        row |= dict.fromkeys(("behind", "behind_low", "behind_high", "as good as the best"))
        if not reason:
            best = measured[0][1]
            behind = _behind(column, best, score, tables)
            row |= {"behind": best.row[column] - score.row[column], "behind_low": behind.low}
            row |= {"behind_high": behind.high, "as good as the best": bool(behind.low <= 0)}
        found.append(row | {"out of reach": reason})
    return found


def _behind(column: str, best: _Score, other: _Score, tables: Mapping[str, pd.DataFrame]) -> Interval:
    """Return the 95 % interval of how far a score is below the best, paired.

    An LDS: halves and queries are drawn anew, the same for both. At a damping that is not the method's best, whose
    ranks are not kept, and for the other questions, queries alone are.
    """
    ranked = all(not score.name.endswith(BY_PAPER) for score in (best, other))
    if ORDERS.get(column) in (SAME, OTHER) and ranked:
        terms = {best.row.method: 1.0}
        terms[other.row.method] = terms.get(other.row.method, 0.0) - 1
        return lds_interval(tables["ranks"], terms, ORDERS[column])
    apart = _by_query(column, best, tables) - _by_query(column, other, tables)
    generator = np.random.default_rng(0)
    return bootstrap_interval(apart.to_numpy(), np.mean, generator=generator)


def _by_query(column: str, score: _Score, tables: Mapping[str, pd.DataFrame]) -> pd.Series:
    """Return what a mean over queries is made of."""
    removals, queries = tables["removals"], tables["queries"]
    if column in ORDERS:
        own = queries[queries.orders == ORDERS[column]]
        return own[_of(own, score)].set_index("query").lds
    own = removals[np.isclose(100 * removals.fraction, float(column.removeprefix("removal_")))]
    if score.row.method == RANDOM:
        return own.groupby("query").random.first()
    return own[_of(own, score)].set_index("query").rise


def _of(rows: pd.DataFrame, score: _Score) -> pd.Series:
    """Return which rows are the score's."""
    damping = score.row.damping
    same = rows.damping.isna() if pd.isna(damping) else pd.Series(np.isclose(rows.damping, damping), rows.index)
    return (rows.method == score.row.method) & same
