"""What Figs. 4, 5 and 6 measure on the branches that leave one state, and its summary over seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, t_interval
from experiments.ngd.sampling import curvature_cutoff

BEFORE = "before"  # the branch that all others leave

MEASURES = (
    "llc_split",
    "llc_slope",
    "llc_change",
    "llc_growth",
    "llc_end",
    "llc_raw_split",
    "llc_raw_slope",
    "llc_raw_change",
    "llc_raw_growth",
    "llc_raw_end",
    "update_norm_ratio",
    "step_norm_ratio",
    "step_norm_end",
    "fluctuation",
    "train_loss_ratio",
    "validation_loss_ratio",
)


@dataclass(frozen=True)
class BranchResults:
    """A table of `branch_table`, what is measured on it, and its summary.

    Attributes:
        table: one row for each epoch.
        measures: one row for each task, branch and seed (`branch_measures`).
        summary: one row for each task and branch (`summary_table`).
    """

    table: pd.DataFrame
    measures: pd.DataFrame
    summary: pd.DataFrame

    @classmethod
    def of(cls, table: pd.DataFrame) -> BranchResults:
        """Measure a table."""
        measures = branch_measures(table)
        return cls(table, measures, summary_table(measures))

    def by_seed(self, task: str, branch: str, measure: str) -> pd.Series:
        """Return a measure of one branch by seed, seeds without it left out."""
        own = self.measures[(self.measures.task == task) & (self.measures.branch == branch)]
        return own.set_index("seed")[measure].dropna()

    def all_branches(self, task: str, *measures: str) -> str:
        """Return a sentence for each measure with its value for all branches: what explains a verdict."""
        own = self.summary[self.summary.task == task]
        sentences = []
        for measure in measures:
            numbers = zip(own.branch, own[measure], own[f"{measure}_low"], own[f"{measure}_high"], strict=True)
            texts = [f"{branch} {mean:.3g} ({low:.3g} to {high:.3g})" for branch, mean, low, high in numbers]
            sentences.append(f"{measure} of all branches (summary.csv): {', '.join(texts)}.")
        return " ".join(sentences)

    def judge_measure(self, claim: Claim, task: str, branch: str, measure: str, *, why: str = "") -> ClaimResult:
        """Judge the mean of a measure over seeds; what explains it is the measure on all branches, or `why`."""
        values = self.by_seed(task, branch, measure)
        return self.judge_values(claim, task, [branch], values, why=why or self.all_branches(task, measure))

    def judge_values(
        self, claim: Claim, task: str, branches: Iterable[str], values: pd.Series, *, why: str
    ) -> ClaimResult:
        """Judge the mean of values by seed; with fewer than two it is out of reach of these branches."""
        values = values.dropna()
        if len(values) < 2:
            return out_of_reach(claim, self.why_no_llc(task, branches))
        return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)

    def why_no_llc(self, task: str, branches: Iterable[str]) -> str:
        """Return why fewer than two seeds have an LLC at the split and after it on these branches."""
        own = self.table[(self.table.task == task) & self.table.branch.isin([BEFORE, *branches])]
        estimates = own[own.llc.notna()]
        counts = estimates[~estimates.valid].problem.value_counts()
        if counts.empty:
            return "It needs estimates of the LLC at two checkpoints after the split, of two seeds."
        return (
            f"{counts.sum()} of {len(estimates)} estimates are not valid, of {counts.iloc[0]} the reason is: "
            f"{counts.index[0]}."
        )


def branch_measures(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, branch and seed with what the claims are about, nan where it cannot be had.

    llc_split: LLC, from the minimum, at the split. llc_slope: slope of its least-squares line over epochs, the
    split included, in LLC for each epoch. llc_change: the same times the epochs of the branch, over the mean of
    llc_split over all seeds (that of one seed may be near 0). llc_growth: the slope over the first half of the
    branch. llc_end: mean LLC of the checkpoints in the second half. Only valid estimates count; where the estimate
    at the split is invalid, those after it are taken. A slope takes points over at least half of its epochs.
    update_norm_ratio, step_norm_ratio: mean of ‖Δw‖/lr and of ‖Δw‖ over the epochs after the split, over that of
    as many epochs before it. step_norm_end: ‖Δw‖ of the last epoch over that of the first. fluctuation: standard
    deviation of the change of ln(‖Δw‖/lr) from epoch to epoch after the split. train_loss_ratio,
    validation_loss_ratio: at the end over at the split. llc_raw_...: the same of the LLC from the weights, at the
    same checkpoints.
    """
    rows = []
    for (task, seed), own in table.groupby(["task", "seed"], sort=False):
        before = own[own.branch == BEFORE].sort_values("epoch")
        for branch, after in own[own.branch != BEFORE].groupby("branch", sort=False):
            row = {"task": task, "branch": branch, "seed": seed, "lr": after.lr.iloc[0]}
            row["curvature_cutoff"] = curvature_cutoff(own)
            for column in ("llc", "llc_raw"):
                row |= _llc_measures(before, after, column)
            rows.append(row | _norm_measures(before, after))
    measures = pd.DataFrame(rows)
    for column in ("llc", "llc_raw"):
        measures[f"{column}_change"] /= measures.groupby("task")[f"{column}_split"].transform("mean")
    return measures


def _llc_measures(before: pd.DataFrame, after: pd.DataFrame, column: str) -> dict[str, float]:
    split, last = before.iloc[-1], after.epoch.max()
    half = (split.epoch + last) / 2
    usable = after[after.valid]
    points = pd.concat([before.tail(1), usable]) if split.valid else usable
    slope = _slope(points, column, last - split.epoch)
    return {
        f"{column}_split": split[column] if split.valid else np.nan,
        f"{column}_slope": slope,
        f"{column}_change": slope * (last - split.epoch),  # made relative once all seeds are known
        f"{column}_growth": _slope(points[points.epoch <= half], column, half - split.epoch),
        f"{column}_end": usable[usable.epoch > half][column].mean(),
    }


def _slope(points: pd.DataFrame, column: str, num_epochs: float) -> float:
    """Return the slope, nan where the points leave more than half of the epochs to extrapolation."""
    wide_enough = len(points) > 1 and np.ptp(points.epoch) >= num_epochs / 2
    return float(np.polyfit(points.epoch, points[column], 1)[0]) if wide_enough else np.nan


def _norm_measures(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, float]:
    after, split = after.sort_values("epoch"), before.iloc[-1]
    window = before[before.epoch > split.epoch - len(after)]
    changes = np.diff(np.log(after.update_norm))
    return {
        "update_norm_ratio": after.update_norm.mean() / window.update_norm.mean(),
        "step_norm_ratio": after.step_norm.mean() / window.step_norm.mean(),
        "step_norm_end": after.step_norm.iloc[-1] / after.step_norm.iloc[0],
        "fluctuation": float(changes.std(ddof=1)) if len(changes) > 1 else np.nan,
        "train_loss_ratio": after.train_loss.iloc[-1] / split.train_loss,
        "validation_loss_ratio": after.validation_loss.iloc[-1] / split.validation_loss,
    }


def summary_table(measures: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task and branch: mean of every measure over seeds, and its 95 % t interval."""
    rows = []
    for (task, branch), own in measures.groupby(["task", "branch"], sort=False):
        row: dict[str, Any] = {"task": task, "branch": branch, "lr": own.lr.iloc[0], "seeds": len(own)}
        row["curvature_cutoff"] = curvature_cutoff(own)
        for name in MEASURES:
            values = own[name].dropna()
            interval = t_interval(values.to_numpy())
            row |= {name: values.mean(), f"{name}_low": interval.low, f"{name}_high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)
