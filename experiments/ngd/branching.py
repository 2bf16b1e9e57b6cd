"""Train by SGD, then let several optimizers go on from that very state: what Figs. 4, 5 and 6 share.

Everything up to the split is one unit of work for each seed, and so is each branch: targets with equal settings
share them. The LLC at the split is that of the state which all branches leave.

At `laptop` the step is stable where the chains end, at most 0.25 of the limit (`LLC.stability`); before, at two to
two and a half times the step, NGD's chains at the raised rate ended above it. No direction turned by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Claim, ClaimResult, Computed, Run, judge, out_of_reach, panels, t_interval
from experiments.ngd.sampling import LOWEST, curvature_cutoff
from experiments.ngd.trajectories import Network, first_columns, last_state, trajectory
from experiments.shared.stats import in_columns

EQUAL_LENGTH = 1.3  # steps of two optimizers that differ by no more are of equal length
NAMES = {"sgd": "SGD", "ngd": "NGD", "exact-ngd": "exact NGD"}
RISES = 0.01  # of the LLC at the split: less is no rise
STILL_RISES = 0.1  # share of the rise since the split, above which the LLC has not levelled off
BEFORE = "before"  # the branch that all others leave
PAPER = {
    "model.hidden_sizes": [256, 256],
    "data._target_": "not stated",
    "seeds": "not stated",
    "before.training.num_epochs": "not stated",
    "after.training.num_epochs": "not stated",
    "before.optimizer.lr": 1e-4,
    "branches.*.lr": "not stated",
    "branches.*.alpha": "not stated for this figure",
    "branches.*.name": "SGD, NGD as in Eqs. 6 and 7; no code",
}


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each epoch, and `summary`, the measures' means over seeds.

    Columns of `table`: task, branch ("before" for what comes before the split), seed, epoch (counted from the
    first), lr, what `trajectory` gives, and step_norm = lr * update_norm, the mean over batches of ‖Δw‖.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`; `before` (optimizer, training, llc_epochs), `after`
            (training, llc_epochs: counted from the split), `branches` (optimizers by name; null: left out),
            `unsampled` (of these, those without an LLC), `exact` (whether the task takes the branches exact-...
            beside sgd, or the others) and `llc`. The LLC is estimated at `llc_epochs` and at both ends.
    """
    parts = []
    for network in Network.each(run, cfg):
        for seed in network.settings.seeds:
            parts += [part.assign(task=network.label, seed=seed) for part in _branches(network, seed)]
    table = pd.concat(parts, ignore_index=True)
    table["step_norm"] = table.lr * table.update_norm
    table["valid"] = table.valid.eq(True)  # nan where there is no estimate
    first = ("task", "branch", "seed", "epoch", "lr", "train_loss", "validation_loss", "update_norm", "step_norm")
    table = first_columns(table, *first)
    run.note(seeds=list(cfg.seeds))
    return {"table": table, "summary": Branches.of(table).summary}


def branches_of(settings: DictConfig) -> dict[str, DictConfig]:
    """Return the optimizers that go on from the split, by name."""
    kept = {str(name): node for name, node in settings.branches.items() if node is not None}
    return {
        name: node for name, node in kept.items() if name == "sgd" or name.startswith("exact-") == settings.exact
    }


def _branches(network: Network, seed: int) -> Iterator[pd.DataFrame]:
    settings = network.settings
    before, after = (
        OmegaConf.create({"llc": settings.llc, "trace": None, "training": settings[phase].training})
        for phase in ("before", "after")
    )
    first, then = (
        {*settings[phase].llc_epochs, settings[phase].training.num_epochs} for phase in ("before", "after")
    )
    optimizer = settings.before.optimizer
    yield trajectory(network, optimizer, before, seed, llc_epochs=first).assign(branch=BEFORE, lr=optimizer.lr)
    start = last_state(network, optimizer, before, seed)
    for name, node in branches_of(settings).items():
        sampled = set() if name in settings.unsampled else then
        rows = trajectory(network, node, after, seed, start=start, llc_epochs=sampled)
        yield rows.assign(branch=name, lr=node.lr)


# ------------------------------------------------------------------------------------ measure
@dataclass(frozen=True)
class Branches:
    """The table of `compute` and what is measured on it.

    Attributes:
        table: one row for each epoch.
        measures: one row for each task, branch and seed (`branch_measures`).
    """

    table: pd.DataFrame
    measures: pd.DataFrame

    @classmethod
    def of(cls, table: pd.DataFrame) -> Branches:
        """Measure a table."""
        return cls(table, branch_measures(table))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each task and branch: mean of every measure over seeds, and its 95 % t interval."""
        rows = []
        for (task, branch), own in self.measures.groupby(["task", "branch"], sort=False):
            row: dict[str, Any] = {"task": task, "branch": branch, "lr": own.lr.iloc[0], "seeds": len(own)}
            row["curvature_cutoff"] = curvature_cutoff(own)
            rows.append(row | {k: v for name in MEASURES for k, v in in_columns(name, own[name].dropna()).items()})
        return pd.DataFrame(rows)

    def tasks(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each task with its branches, in the order of the table."""
        for task, own in self.measures.groupby("task", sort=False):
            yield str(task), own.branch.unique().tolist()

    def by_seed(self, task: str, branch: str, measure: str) -> pd.Series:
        """Return a measure of one branch by seed, seeds without it left out."""
        own = self.measures[(self.measures.task == task) & (self.measures.branch == branch)]
        return own.set_index("seed")[measure].dropna()

    def told(self, task: str, *measures: str) -> str:
        """Return a sentence for each measure with its value for all branches: what explains a verdict."""
        own, sentences = self.summary[self.summary.task == task], []
        for measure in measures:
            numbers = zip(own.branch, own[measure], own[f"{measure}_low"], own[f"{measure}_high"], strict=True)
            texts = [f"{branch} {mean:.3g} ({low:.3g} to {high:.3g})" for branch, mean, low, high in numbers]
            sentences.append(f"{measure} of all branches (summary.csv): {', '.join(texts)}.")
        return " ".join(sentences)

    def judge_measure(self, claim: Claim, task: str, branch: str, measure: str, *, why: str = "") -> ClaimResult:
        """Judge the mean of a measure over seeds; what explains it is the measure on all branches, or `why`."""
        values = self.by_seed(task, branch, measure)
        return self.judge_values(claim, task, [branch], values, why=why or self.told(task, measure))

    def judge_values(
        self, claim: Claim, task: str, branches: Iterable[str], values: pd.Series, *, why: str
    ) -> ClaimResult:
        """Judge the mean of values by seed; with fewer than two it is out of reach of these branches."""
        values = values.dropna()
        if len(values) < 2:
            return out_of_reach(claim, self.why_no_llc(task, branches))
        return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)

    def judge_direction(self, claim: Claim, task: str, sgd: str, ngd: str, column: str) -> ClaimResult:
        """Judge NGD's LLC over SGD's after the split, where their steps are of equal length.

        The mean over the checkpoints at which both count and that epoch's steps, too, are of equal length: NGD's
        minus SGD's, over the seeds' LLC at the split. Where a seed lacks one, its mean is of the others.
        """
        lengths = self.by_seed(task, ngd, "step_norm_ratio") / self.by_seed(task, sgd, "step_norm_ratio")
        if not of_equal_length(lengths.mean()):
            reason = f"The steps are not of equal length: NGD's are {lengths.mean():.2g} times as long as SGD's."
            return out_of_reach(claim, reason)
        if reason := self.below_zero(task, [sgd, ngd], column):
            return out_of_reach(claim, reason)
        own = self.counted(column)[lambda table: (table.task == task) & table.branch.isin([sgd, ngd])]
        llcs, steps = (
            own.pivot_table(index=["seed", "epoch"], columns="branch", values=values).reindex(columns=[sgd, ngd])
            for values in (column, "step_norm")
        )
        counted, equal = llcs.dropna(), of_equal_length(steps[ngd] / steps[sgd])
        both = counted[equal.reindex(counted.index, fill_value=False)]
        levels = self.by_seed(task, ngd, f"{column}_split")
        if len(counted) and both.empty:
            return out_of_reach(claim, "In no checkpoint's own epoch are the steps of equal length.")
        if both.empty or not len(levels):
            return out_of_reach(claim, self.why_no_llc(task, [sgd, ngd]))
        values = (both[ngd] - both[sgd]).groupby("seed").mean() / levels.mean()
        why = (
            f"Steps: NGD's are {lengths.mean():.3g} times as long as SGD's. {self.told(task, f'{column}_change')}"
        )
        return self.judge_values(claim, task, [sgd, ngd], values, why=why)

    def below_zero(self, task: str, branches: Collection[str], column: str) -> str:
        """Return why the LLC of a branch says nothing: its mean after the split is at most 0; or ""."""
        own = self.counted(column)[lambda table: (table.task == task) & table.branch.isin(branches)]
        low = [(name, mean) for name, mean in own.groupby("branch")[column].mean().items() if mean <= 0]
        listed = ", ".join(f"{name} {mean:.3g}" for name, mean in low)
        return (
            f"No LLC is below 0, and after the split the mean estimate is not above it: {listed}." if low else ""
        )

    def counted(self, column: str) -> pd.DataFrame:
        """Return the checkpoints whose estimates count: the valid ones, and as the paper measures it, raw, all."""
        return self.table[self.table.valid if column == "llc" else self.table[column].notna()]

    def still_rising(self, task: str, branches: Iterable[str], column: str) -> str:
        """Return which of the branches' LLCs still rise at the end, so that no plateau is seen; "" if none."""
        own = self.counted(column)[lambda table: table.task == task]
        split = own[own.branch == BEFORE].groupby("epoch")[column].mean().tail(1).tolist()
        found = []
        for branch in branches:
            levels = [*split, *own[own.branch == branch].groupby("epoch")[column].mean()]
            if len(levels) < 3:  # the split, and two checkpoints after it
                continue
            gain, last = levels[-1] - levels[0], levels[-1] - levels[-2]
            if gain > RISES * levels[0] and last > STILL_RISES * gain:
                found.append(f"{branch} by {last:.3g} of {gain:.3g} between the last two checkpoints")
        return f"No plateau is reached, the LLC still rises: {', '.join(found)}." if found else ""

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


def of_equal_length(ratio: float | pd.Series) -> Any:
    """Return whether steps whose lengths have this ratio are of equal length."""
    return (ratio >= 1 / EQUAL_LENGTH) & (ratio <= EQUAL_LENGTH)


_OF_LLC = ("split", "slope", "change", "growth", "end")
MEASURES = (
    *(f"{column}_{name}" for column in ("llc", "llc_raw") for name in _OF_LLC),
    "update_norm_ratio",
    "update_norm_first",
    "step_norm_ratio",
    "step_norm_end",
    "fluctuation",
    "train_loss_ratio",
    "validation_loss_ratio",
)


def branch_measures(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, branch and seed with what the claims are about, nan where it cannot be had.

    llc_split: LLC, from the lowest sampled point, at the split. llc_slope: slope of its line over epochs, the
    split included, in LLC for each epoch. llc_change: the same times the epochs of the branch, over the mean of
    llc_split over all seeds (that of one seed may be near 0). llc_growth: the slope from the split to the first
    checkpoint after it. llc_end: mean LLC of the checkpoints in the second half, if all are valid. Only valid
    estimates count; where the estimate at the split is invalid, those after it are taken. A slope takes points
    over at least half of its epochs. llc_raw_...: the same of the LLC from the weights, valid or not.

    update_norm_ratio, step_norm_ratio: mean of ‖Δw‖/lr and of ‖Δw‖ over the epochs after the split, over that of
    as many epochs before it; update_norm_first: the same of the first epoch after the split. step_norm_end: ‖Δw‖
    of the last epoch over that of the first. fluctuation: standard deviation of the change of ln(‖Δw‖/lr) from
    epoch to epoch after the split. train_loss_ratio, validation_loss_ratio: at the end over at the split.
    """
    rows = []
    for (task, seed), own in table.groupby(["task", "seed"], sort=False):
        before = own[own.branch == BEFORE].sort_values("epoch")
        for branch, rest in own[own.branch != BEFORE].groupby("branch", sort=False):
            after = rest.sort_values("epoch")
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
    if column == "llc_raw":  # as the paper measures it none is refused
        before, after = (rows.assign(valid=rows[column].notna()) for rows in (before, after))
    split, last = before.iloc[-1], after.epoch.max()
    half, first = (split.epoch + last) / 2, after[after[column].notna()].epoch.min()
    usable, late = after[after.valid], after[(after.epoch > half) & after[column].notna()]
    points = pd.concat([before.tail(1), usable]) if split.valid else usable
    slope = _slope(points, column, last - split.epoch)
    found = {
        "split": split[column] if split.valid else np.nan,
        "slope": slope,
        "change": slope * (last - split.epoch),  # made relative once all seeds are known
        "growth": _slope(points[points.epoch <= first], column, first - split.epoch),
        "end": late[column].mean() if late.valid.all() else np.nan,
    }
    return {f"{column}_{name}": value for name, value in found.items()}


def _slope(points: pd.DataFrame, column: str, num_epochs: float) -> float:
    """Return the slope, nan where the points leave more than half of the epochs to extrapolation."""
    wide_enough = len(points) > 1 and np.ptp(points.epoch) >= num_epochs / 2
    return float(np.polyfit(points.epoch, points[column], 1)[0]) if wide_enough else np.nan


def _norm_measures(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, float]:
    split = before.iloc[-1]
    window = before[before.epoch > split.epoch - len(after)]
    changes = np.diff(np.log(after.update_norm))
    return {
        "update_norm_ratio": after.update_norm.mean() / window.update_norm.mean(),
        "update_norm_first": after.update_norm.iloc[0] / window.update_norm.mean(),
        "step_norm_ratio": after.step_norm.mean() / window.step_norm.mean(),
        "step_norm_end": after.step_norm.iloc[-1] / after.step_norm.iloc[0],
        "fluctuation": float(changes.std(ddof=1)) if len(changes) > 1 else np.nan,
        "train_loss_ratio": after.train_loss.iloc[-1] / split.train_loss,
        "validation_loss_ratio": after.validation_loss.iloc[-1] / split.validation_loss,
    }


# ------------------------------------------------------------------------------------ draw
LABELS = {"update_norm": "update size ‖Δw‖/lr", "llc": "LLC from the lowest point"}
RATES = {"low": (":", "v"), "middle": ("--", "D"), "high": ("-.", "^"), "raised": ("-.", "^")}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return update size and LLC, the paper's panels, of the task nearest to the paper's, and of all tasks."""
    table = _from_the_split(computed["table"])
    exact = table.task.isin(table[table.branch.str.startswith("exact-")].task)
    nearest = table[~exact].task.iloc[-1] if not exact.all() else table.task.iloc[0]
    return {"figure.png": _figure(table[table.task == nearest]), "figure_more.png": _figure(table)}


def _from_the_split(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with every seed's LLC moved so that all have their mean at the split.

    Bands are then of the change, not of what the networks differ by. A seed without a valid estimate at the split
    is not moved, and does not count.
    """
    at_split = table[(table.branch == BEFORE) & table.valid].sort_values("epoch")
    splits = at_split.groupby(["task", "seed"]).llc.last()
    own = pd.MultiIndex.from_frame(table[["task", "seed"]])
    shift = table.task.map(splits.groupby("task").mean()) - splits.reindex(own).to_numpy()
    return table.assign(llc=table.llc + shift.fillna(0), valid=table.valid & shift.notna())


def _figure(table: pd.DataFrame) -> Figure:
    several = table.task.nunique() > 1
    size = (3.5, 2.6 if several else 3.8)  # title and legend take their part of a single row
    figure, rows = panels.rows(table, by="task", columns=len(LABELS), panel_size=size)
    for axes, task, own in rows:
        split = own[own.branch == BEFORE].epoch.max()
        shown = own[own.epoch > split - (own.epoch.max() - split)]  # as many epochs before as after
        for ax, quantity in zip(axes, LABELS, strict=True):
            _panel(ax, shown, quantity, split, several)
            panels.frame(ax, x="epoch", y=LABELS[quantity], log="" if quantity == "llc" else "y")
            ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes[0].set_title(task, loc="left")
        if several:
            axes[1].set_title(f"rates: {_rates(own)}", loc="left", fontsize=8.5)
    number = panels.seeds(table.groupby("task").seed.nunique())
    note = (
        f"dotted: the split; mean over {number}, band: 95 % t interval, of the LLC: of its change since the split"
    )
    note += f"\nvalid estimates alone; {LOWEST}"
    panels.legend(figure, title=note, columns=3)
    return figure


def _panel(ax: Axes, table: pd.DataFrame, quantity: str, split: int, several: bool) -> None:
    sampled = quantity == "llc"
    usable = table[table.valid] if sampled else table
    at_split = usable[(usable.branch == BEFORE) & (usable.epoch == split)]
    styles = {branch: _style(branch) for branch in table.branch.unique()}
    for branch, own in usable.groupby("branch", sort=False):
        # A norm is of the updates within an epoch, not of the state at its end: nothing joins it to the split.
        joined = own if branch == BEFORE or quantity.endswith("norm") else pd.concat([at_split, own])
        look: dict[str, Any] = {} if sampled else {"marker": "", "least": 0.2}
        name = _entry(str(branch), None if several else float(own.lr.iloc[0]))
        panels.lines(ax, joined, x="epoch", y=quantity, styles={name: styles[branch]}, label=name, **look)
    panels.rule(ax, x=split, linestyle=":")
    if sampled:
        panels.counts(ax, table[table[quantity].notna()], x="epoch", valid="valid", by="branch", styles=styles)


def _optimizer(branch: str) -> str:
    return "sgd" if branch.startswith("sgd") else "exact-ngd" if branch.startswith("exact-") else "ngd"


def _rates(table: pd.DataFrame) -> str:
    """Say the learning rates after the split, by optimizer."""
    after = table[table.branch != BEFORE]
    rates = after.groupby(after.branch.map(_optimizer), sort=False).lr.unique()
    return "; ".join(
        f"{NAMES[str(name)]} {', '.join(f'{rate:g}' for rate in sorted(own))}" for name, own in rates.items()
    )


def _entry(branch: str, lr: float | None) -> str:
    """Return a line's name in the legend; without `lr`, where rates differ by task, the word for its rate."""
    if branch == BEFORE:
        return "before the split: SGD" + ("" if lr is None else f", rate {lr:g}")
    word = branch.removesuffix("-unrescaled").rpartition("-")[2]
    rate = f", rate {lr:g}" if lr is not None else f", {word} rate" if word in RATES else ""
    return NAMES[_optimizer(branch)] + (", not rescaled" if branch.endswith("-unrescaled") else "") + rate


def _style(branch: str) -> dict[str, Any]:
    """Return the colour of the optimizer, the line of its rate, and a paler shade for NGD that is not rescaled."""
    if branch == BEFORE:
        return {"color": panels.GREY, "marker": ".", "linestyle": "-"}
    plain = branch.removesuffix("-unrescaled")
    own = panels.styles_of([_optimizer(branch)])[_optimizer(branch)]
    line, marker = RATES.get(plain.rpartition("-")[2], ("-", own["marker"]))
    return {
        "color": own["color"],
        "marker": marker,
        "linestyle": line,
        "alpha": 0.4 if plain != branch else 1.0,
        "zorder": 1.9 if plain != branch else 2.0,  # a pale line above another would change its colour
    }
