"""Train SGD and NGD until they overfit: what Figs. 7 and 8 share, from the same units of work.

Where the paper's data is too large to overfit in the time (digits), a share of the training labels is drawn anew
at random (`label_noise`): noise that only memory can fit, as in the paper's "the model learns noise in the data".
The validation labels stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from omegaconf import DictConfig
from scipy import stats

from curvlab.lab import Claim, ClaimResult, Computed, Interval, Run, judge, out_of_reach, panels, t_interval
from curvlab.lab.reporting.plots import MIN_SEEDS
from experiments.ngd.sampling import LOWEST, curvature_cutoff
from experiments.ngd.trajectories import trajectories
from experiments.shared.stats import mean

PAPER = {
    "data.num_train": "60000, not stated",
    "label_noise": "none",
    "model.hidden_sizes": "not stated",
    "seeds": "not stated",
    "training.num_epochs": "not stated",
    "optimizers.ngd.lr": 0.01,
    "optimizers.ngd.alpha": 0.1,
    "training.batch_size": 128,
    "trace.max_matvecs": 10000,
}
JUDGED = ("llc", "trace", "wbic")
QUANTITIES = ("validation_loss", *JUDGED)
RISES = 0.1  # relative rise of the validation loss from which a seed counts among those that overfit
_SAMPLED = {"llc": "llc_raw", "wbic": "wbic"}  # from chains, which may be not valid; and what the paper takes


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, optimizer, seed and checkpoint, `summary` and `last_epoch`.

    Further columns of `table` as of `trajectory`, and num_train, n. `summary` is of `since_minimum`, `last_epoch`
    of `last_epoch_table`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `optimizers` by name, `label_noise`, and what
            `trajectory` takes.
    """
    table = trajectories(run, cfg)
    return {
        "table": table,
        "summary": since_minimum(table),
        "last_epoch": last_epoch_table(table, changes_by_last_epoch(table)),
    }


def since_minimum(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, optimizer, seed and quantity: what it does past the smallest validation loss.

    Columns: minimum_epoch, the checkpoint of the smallest validation loss; checkpoints, how many from there on
    count (of LLC and WBIC, those with valid estimates); first_epoch, first, last_epoch, last, the quantity at the
    first and last of them; change, last/first - 1, where both are above 0 and at least half of the epochs from the
    minimum on apart; rank_correlation, Spearman's with the validation loss over them; sampled_change, the change
    with every estimate, valid or not, from the weights, as in the paper, nan where it starts below 0;
    train_loss_first, train_loss_last, the training losses there (nats); curvature_cutoff, γ/(nβ) of what is
    sampled.
    """
    rows = []
    for place, own in table.groupby(["task", "optimizer", "seed"], sort=False):
        ordered = own.sort_values("epoch")
        minimum = int(ordered.epoch.iloc[ordered.validation_loss.argmin()])
        after = ordered[ordered.epoch >= minimum]
        for quantity in QUANTITIES:
            counted = after[after.valid.astype(bool)] if quantity in _SAMPLED else after
            row: dict[str, Any] = dict(zip(("task", "optimizer", "seed"), place, strict=True))
            row |= {"quantity": quantity, "minimum_epoch": minimum, "checkpoints": len(counted)}
            row["curvature_cutoff"] = curvature_cutoff(own) if quantity in _SAMPLED else np.nan
            unknown = ("first_epoch", "first", "last_epoch", "last", "change", "rank_correlation")
            row |= dict.fromkeys((*unknown, "sampled_change", "train_loss_first", "train_loss_last"), np.nan)
            if len(counted) > 1:
                for end, at in (("first", counted.iloc[0]), ("last", counted.iloc[-1])):
                    row |= {f"{end}_epoch": at.epoch, end: at[quantity], f"train_loss_{end}": at.train_loss}
                far = row["last_epoch"] - row["first_epoch"] >= (after.epoch.max() - minimum) / 2
                if far and min(row["first"], row["last"]) > 0:
                    row["change"] = row["last"] / row["first"] - 1
            if len(counted) > 2 and quantity != "validation_loss":
                found = stats.spearmanr(counted.validation_loss, counted[quantity])
                row["rank_correlation"] = float(found.statistic)
            sampled = after[_SAMPLED.get(quantity, quantity)]
            if len(after) > 1 and sampled.iloc[0] > 0:
                row["sampled_change"] = sampled.iloc[-1] / sampled.iloc[0] - 1
            rows.append(row)
    return pd.DataFrame(rows)


def overfitted(since: pd.DataFrame, optimizer: str, quantity: str) -> pd.DataFrame:
    """Return the rows of a quantity: of all seeds for the validation loss, else of those that overfit."""
    own = since[since.optimizer == optimizer]
    rises = own[own.quantity == "validation_loss"]
    if quantity == "validation_loss":
        return rises
    return own[(own.quantity == quantity) & own.seed.isin(rises[rises.change >= RISES].seed)]


# ------------------------------------------------------------------------------------ had training ended earlier
PLACE = ["task", "optimizer", "quantity"]


def changes_by_last_epoch(table: pd.DataFrame, change: str = "change") -> pd.DataFrame:
    """Return every change that is judged, of the table cut off at each checkpoint: one row for each that there is.

    Columns: task, optimizer, quantity (llc, trace, wbic), last_epoch, the checkpoint at which training ends, seed,
    change. All as in `since_minimum` of the checkpoints up to there: the minimum of the validation loss is the
    smallest so far, only seeds count whose validation loss has risen by then, and only valid estimates, or with
    `change` "sampled_change" all.
    """
    parts = []
    for epoch in sorted(table.epoch.unique())[1:]:
        since = since_minimum(table[table.epoch <= epoch])
        for (_, optimizer), own in since.groupby(["task", "optimizer"], sort=False):
            for quantity in JUDGED:
                used = overfitted(own, str(optimizer), quantity).dropna(subset=change)
                parts.append(used[[*PLACE, "seed"]].assign(change=used[change], last_epoch=epoch))
    return pd.concat(parts, ignore_index=True)[[*PLACE, "last_epoch", "seed", "change"]]


def last_epoch_table(
    table: pd.DataFrame,
    changes: pd.DataFrame,
    mean_of: Callable[[ArrayLike], tuple[float, Interval]] | None = None,
) -> pd.DataFrame:
    """Return one row for each task, optimizer, quantity and checkpoint at which training might have ended.

    `changes` are `changes_by_last_epoch` of the table; means are by `mean_of`, by default `mean_change`.

    Columns: seeds, those that overfit by then and have the quantity; change, low, high, their mean, with
    an interval for three or more; sign: rises or falls where the whole interval does, undecided elsewhere, none
    with fewer than three seeds.
    """
    groups = {place: own.change.to_numpy(float) for place, own in changes.groupby([*PLACE, "last_epoch"])}
    rows = []
    for (task, optimizer), own in table.groupby(["task", "optimizer"], sort=False):
        for quantity in JUDGED:
            for epoch in sorted(own.epoch.unique())[1:]:
                values = groups.get((task, optimizer, quantity, epoch), np.empty(0))
                row: dict[str, Any] = {"task": task, "optimizer": optimizer, "quantity": quantity}
                row |= {"last_epoch": epoch, "seeds": len(values), "change": np.nan, "low": np.nan, "high": np.nan}
                if len(values):
                    row["change"], interval = (mean_of or mean_change)(values)
                if len(values) >= MIN_SEEDS:
                    row |= {"low": interval.low, "high": interval.high}
                rows.append(row | {"sign": _sign(row)})
    return pd.DataFrame(rows)


def mean_change(changes: ArrayLike) -> tuple[float, Interval]:
    """Return the change of the geometric mean over seeds, and its t interval: of the logarithms, so above -1."""
    logs = np.log1p(np.asarray(changes, dtype=float))
    return float(np.expm1(logs.mean())), t_interval(logs).mapped(lambda value: float(np.expm1(value)))


def _sign(row: Mapping[str, Any]) -> str:
    if row["seeds"] < MIN_SEEDS:
        return "none"
    if row["low"] > 0:
        return "rises"
    return "falls" if row["high"] < 0 else "undecided"


# ------------------------------------------------------------------------------------ judge
def judge_overfits(claim: Claim, since: pd.DataFrame, optimizer: str) -> ClaimResult:
    """Judge the rise of the validation loss of one optimizer, from `since_minimum` of one task."""
    values = overfitted(since, optimizer, "validation_loss").change.fillna(0.0)
    why = "Train for more epochs, on fewer examples, or with more label noise."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def judge_increases(  # noqa: PLR0917
    claim: Claim, since: pd.DataFrame, ends: pd.DataFrame, optimizer: str, quantity: str, more: str = ""
) -> ClaimResult:
    """Judge the change of a quantity (llc, trace, wbic) while `optimizer` overfits, wherever training ends.

    The value is the change at the last checkpoint; the interval reaches from the lowest to the highest of the 95 %
    intervals that training would have given, had it ended at another checkpoint: `ends` are `last_epoch_table` of
    the task. `more` explains it further.
    """
    used = overfitted(since, optimizer, quantity).dropna(subset="change")
    if (lacking := why_none(since, optimizer, used)) is not None:
        return out_of_reach(claim, lacking)
    ends = ends[(ends.optimizer == optimizer) & (ends.quantity == quantity) & (ends.seeds >= MIN_SEEDS)]
    epochs = f"epochs {used.first_epoch.mean():.0f} to {used.last_epoch.mean():.0f} (means over {len(used)} seeds)"
    why = (
        f"It goes from {used['first'].mean():.4g} to {used['last'].mean():.4g}, {epochs}, while the "
        f"training loss goes from {used.train_loss_first.mean():.3g} to {used.train_loss_last.mean():.3g}; "
        "the curvature of the cross-entropy vanishes as that nears zero, which may be why."
    )
    return _wherever_it_ends(claim, *mean_change(used.change), ends, f"{why} {more}")


def judge_raw_increase(
    claim: Claim, table: pd.DataFrame, since: pd.DataFrame, optimizer: str, quantity: str = "llc"
) -> ClaimResult:
    """Judge the change of LLC or WBIC as the paper measures it: every estimate, valid or not, from the weights.

    Wherever training ends, as `judge_increases`; means of changes, since an estimate from the weights may be
    below 0. `table` has the checkpoints of the task.
    """
    used = overfitted(since, optimizer, quantity).dropna(subset="sampled_change")
    if (lacking := why_none(since, optimizer, used, "estimates above 0")) is not None:
        return out_of_reach(claim, lacking)
    ends = last_epoch_table(table, changes_by_last_epoch(table, "sampled_change"), mean)
    ends = ends[(ends.optimizer == optimizer) & (ends.quantity == quantity) & (ends.seeds >= MIN_SEEDS)]
    why = "From the minimum of the validation loss to the last checkpoint."
    return _wherever_it_ends(claim, *mean(used.sampled_change), ends, why)


def _wherever_it_ends(
    claim: Claim, change: float, interval: Interval, ends: pd.DataFrame, why: str
) -> ClaimResult:
    """Judge a change at the last checkpoint by all the intervals of `ends`, rows of `last_epoch_table`."""
    if len(ends):
        low, high = min(ends.low.min(), interval.low), max(ends.high.max(), interval.high)
        kind = (
            f"all of the t 95 % intervals of {len(ends)} ends of training, {int(ends.seeds.min())} seeds or more"
        )
        interval = Interval(float(low), float(high), kind, interval.num_samples)
        if low < 0 < high and set(ends.sign) >= {"rises", "falls"}:
            texts = [_told(row) for row in ends.to_dict("records")]
            why = f"It depends on where training ends, by its last epoch: {', '.join(texts)}. {why}"
    return judge(claim, change, interval, if_not_reproduced=why)


def judge_sign(
    claim: Claim, changes: pd.DataFrame, ends: pd.DataFrame, optimizer: str, quantity: str
) -> ClaimResult:
    """Judge whether the sign of the change depends on where training ends.

    For each seed: of the logarithms of its ratios at all ends, the smallest in the direction of the mean one at
    the last; it is negative where the seed would have shown the opposite at some end. `changes` and `ends` are
    `changes_by_last_epoch` and `last_epoch_table` of one task.
    """
    own = changes[(changes.optimizer == optimizer) & (changes.quantity == quantity)]
    logs = np.log1p(own.change)
    at_end = logs[own.last_epoch == ends.last_epoch.max()]
    if len(at_end) < 2:
        found = f"there are {len(at_end)}"
        return out_of_reach(claim, f"Where training ends it needs two seeds with a change that counts; {found}.")
    if own.last_epoch.nunique() < 2:
        return out_of_reach(claim, "Had training ended earlier, no seed would have a change that counts.")
    values = own.assign(along=np.sign(at_end.mean()) * logs).groupby("seed").along.min()
    told = ends[(ends.optimizer == optimizer) & (ends.quantity == quantity) & (ends.seeds > 0)]
    texts = [_told(row) for row in told.to_dict("records")]
    why = f"The change by the epoch at which training ends (last_epoch.csv): {', '.join(texts)}."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def why_none(
    since: pd.DataFrame, optimizer: str, used: pd.DataFrame, counted: str = "valid estimates"
) -> str | None:
    """Return why `used` is too little to judge; None where it is enough."""
    if len(used) > 1:
        return None
    rises = overfitted(since, optimizer, "validation_loss").change
    return (
        f"{int((rises >= RISES).sum())} of {len(rises)} seeds overfit, {len(used)} of them with enough {counted} "
        "from the minimum of the validation loss on; two are needed."
    )


def _told(row: Mapping[Any, Any]) -> str:
    interval = f"{row['low']:+.2f} to {row['high']:+.2f}; " if row["seeds"] >= MIN_SEEDS else ""
    return f"{row['last_epoch']}: {row['change']:+.2f} ({interval}{row['seeds']} seeds)"


# ------------------------------------------------------------------------------------ draw
STYLES = panels.styles_of(("SGD", "NGD"))
NOTE = (
    "mean over {}, band: 95 % t interval; hollow: not valid, or not for every seed\n"
    "dotted: the smallest validation loss (median epoch of the seeds); from there on it overfits"
)


def for_readers(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the names of optimizers that stand in figures."""
    return table.assign(optimizer=table.optimizer.str.upper())


def note(computed: Computed, optimizers: Collection[str] = ("sgd", "ngd")) -> str:
    """Say what bands, rings and lines are, and the learning rates of those drawn beside the paper's."""
    rates = {
        name.upper(): each["lr"] for name, each in computed.config["optimizers"].items() if name in optimizers
    }
    told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    seeds = panels.seeds(computed["table"].groupby("task").seed.nunique())
    return f"{NOTE.format(seeds)}\nlearning rates: {told}; the paper's {PAPER['optimizers.ngd.lr']:g}"


def draw_losses(ax: Axes, table: pd.DataFrame) -> None:
    """Draw training and validation losses over epochs."""
    for column, linestyle in {"train_loss": "-", "validation_loss": "--"}.items():
        part = "training" if column == "train_loss" else "validation"
        named = table.assign(entry=table.optimizer + f", {part}")
        styles = {f"{name}, {part}": STYLES[name] | {"linestyle": linestyle} for name in STYLES}
        panels.lines(ax, named, x="epoch", y=column, by="entry", styles=styles, least=0.2)
    _frame(ax, table, "loss (nats)", log="xy")


def draw_estimates(
    ax: Axes, table: pd.DataFrame, y: str, label: str, *, by: str = "optimizer", styles: Any = STYLES
) -> None:
    """Draw means over seeds; a marker is hollow where not every seed is valid."""
    panels.lines(ax, table, x="epoch", y=y, by=by, styles=styles, marker="")
    means = table.groupby([by, "epoch"], sort=False).agg(y=(y, "mean"), valid=("valid", "all")).reset_index()
    means["hollow"] = ~means.valid.astype(bool)
    panels.scatter(ax, means, x="epoch", y="y", by=by, hollow="hollow", identity=False, styles=styles, zorder=3)
    _frame(ax, table, label)


def draw_trace(ax: Axes, table: pd.DataFrame, label: str) -> None:
    """Draw geometric means over seeds, and t intervals of the logarithms, which do not go below 0."""
    rows = []
    for (optimizer, epoch), own in table[table.trace > 0].groupby(["optimizer", "epoch"], sort=False):
        interval = t_interval(np.log(own.trace))
        ends = (interval.low, interval.high) if len(own) >= MIN_SEEDS else (np.nan, np.nan)
        row = {"optimizer": optimizer, "epoch": epoch, "trace": np.exp(np.log(own.trace).mean())}
        rows.append(row | {"low": np.exp(ends[0]), "high": np.exp(ends[1])})
    means = pd.DataFrame(rows)
    panels.lines(ax, means, x="epoch", y="trace", by="optimizer", low="low", high="high", styles=STYLES)
    _frame(ax, table, label, log="xy")


def draw_paths(table: pd.DataFrame, quantities: Mapping[str, str], *, losses: bool = False) -> Figure:
    """Return for each task a row: the mean path over seeds through (validation loss, quantity), its ends' epochs.

    Args:
        table: of `compute`, its names for readers.
        quantities: labels by name.
        losses: whether losses over epochs stand before them.
    """
    shown = ["validation_loss", *quantities]
    figure, rows = panels.rows(table, by="task", columns=losses + len(quantities), panel_size=(4.2, 3.4))
    for axes, task, own in rows:
        if losses:
            draw_losses(axes[0], own)
        means = own.groupby(["optimizer", "epoch"], sort=False)[shown].mean().reset_index()
        for ax, (quantity, label) in zip(axes[losses:], quantities.items(), strict=True):
            for name, path in means.groupby("optimizer", sort=False):
                style = STYLES[name]
                ax.plot(path.validation_loss, path[quantity], markersize=4, label=name, **style)
                ends = path.iloc[[0, -1]]
                up = name == "SGD"  # its ends and NGD's may lie beside each other
                for epoch, x, y in zip(ends.epoch, ends.validation_loss, ends[quantity], strict=True):
                    left = up and epoch == ends.epoch.iloc[0]
                    place: dict[str, Any] = {"xytext": (-4 if left else 4, 5 if up else -5), "fontsize": 8}
                    place |= {"ha": "right" if left else "left", "va": "bottom" if up else "top"}
                    ax.annotate(str(epoch), (x, y), color=style["color"], textcoords="offset points", **place)
            panels.frame(ax, x="validation loss (nats)", y=label)
            ax.margins(x=0.15, y=0.15)
        axes[0].set_title(task, loc="left")
    note = "means over seeds of every estimate, valid or not\nnumbers: first and last epoch"
    panels.legend(figure, title=f"{note}; {LOWEST}" if "llc" in quantities else note)
    return figure


def _frame(ax: Axes, table: pd.DataFrame, label: str, log: str = "x") -> None:
    """Name the axes, and draw a vertical line at the epoch of the smallest validation loss, the seeds' median."""
    lowest = table.loc[table.groupby(["optimizer", "seed"], sort=False).validation_loss.idxmin()]
    for name, epoch in lowest.groupby("optimizer").epoch.median().items():
        panels.rule(ax, x=float(epoch), color=STYLES[name]["color"], linestyle=":")
    panels.frame(ax, x="epoch", y=label, log=log)
