"""Table 1, plot: the race over ranks, all racers side by side, and the curves of their training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots, t_interval

FLAT = {"momentum": 2, "adam": 3}  # colour of what has no rank
RANKED = {"qng": 1, "ginger": 0}
LABELS = {"momentum": "Momentum", "adam": "Adam", "qng": "QNG", "ginger": "Ginger"}
CURVES = ("ginger", "qng", "momentum", "adam", "ngd", "muon", "soap")  # in the palette's order
QUANTITIES = {"test_accuracy": ("test accuracy (%)", 100), "min_train_loss": ("smallest training loss (nats)", 1)}
KINDS = {"paper": ("o", "black"), "wider": ("s", "black"), "ablation": ("o", "none")}  # marker, its inside


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the race, and the curves of training loss and validation accuracy against steps and seconds."""
    table, summary = computed["table"], computed["summary"]
    rank = int(computed.config["tuned_rank"])
    return {
        "figure.png": _race(table, summary, computed["absent"], computed["paper"]),
        "figure_curves.png": _curves(computed["curves"], table, rank),
    }


# ------------------------------------------------------------------------------------------ the race
def _race(table: pd.DataFrame, summary: pd.DataFrame, absent: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    tasks = summary.task.unique().tolist()
    tallest = max(len(own) for _, own in _listed(summary).groupby("task"))
    figure, axes = plots.figure(
        len(tasks) + 1, 3, panel_size=(3.9, max(2.8, 0.19 * tallest + 0.9)), width_ratios=[1, 1, 1.3]
    )
    for row, task in zip(axes, tasks, strict=False):
        own = summary[summary.task == task]
        _by_rank(row[0], table[table.task == task], "test_accuracy")
        _by_rank(row[1], table[table.task == task], "min_train_loss")
        _all_racers(row[2], own, table[table.task == task], absent[absent.task == task])
        row[0].set_title(task)
    printed = paper.rename(columns={"accuracy": "test_accuracy"})
    panels = (("ResNet-18", "test_accuracy"), ("ResNet-18", "min_train_loss"), ("ResNet-50", "test_accuracy"))
    for ax, (model, column) in zip(axes[-1], panels, strict=True):
        _by_rank(ax, printed[printed.model == model], column)
        ax.set_title(f"printed: {model}, CIFAR-100")
        if column == "test_accuracy":
            ax.set_ylabel("best validation accuracy (%)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _by_rank(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """Draw means over seeds with 95 % t intervals, of the logarithm where the axis is logarithmic."""
    label, scale = QUANTITIES[column]
    logarithmic = column == "min_train_loss"

    def ends(values: pd.Series) -> tuple[float, float, float]:
        sample = np.log(values.dropna()) if logarithmic else values
        interval = t_interval(sample.to_numpy())
        found = np.array([sample.mean(), interval.low, interval.high])
        return tuple(scale * (np.exp(found) if logarithmic else found))

    for racer, color in RANKED.items():
        runs = table[table.racer == racer]
        style: dict[str, Any] = {"color": plots.PALETTE[color], "marker": plots.MARKERS[color]}
        ranks = sorted(runs["rank"].unique())
        mean, low, high = np.array([ends(runs[runs["rank"] == rank][column]) for rank in ranks]).T
        errors = None if np.isnan(low).any() else [mean - low, high - mean]
        ax.errorbar(ranks, mean, yerr=errors, capsize=3, markersize=5, label=LABELS[racer], **style)
        if errors is not None:
            ax.scatter(runs["rank"], scale * runs[column], s=6, alpha=0.5, color=style["color"])
    for racer, color in FLAT.items():
        own = table[table.racer == racer]
        if len(own):
            mean, low, high = ends(own[column])
            ax.axhline(mean, linewidth=1.2, linestyle="--", color=plots.PALETTE[color], label=LABELS[racer])
            if np.isfinite(low):
                ax.axhspan(low, high, color=plots.PALETTE[color], alpha=0.12, linewidth=0)
    ranks = sorted(table["rank"].dropna().unique())
    if logarithmic:
        ax.set_yscale("log")
        plots.readable_log(ax.yaxis)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [f"{rank:.0f}" for rank in ranks])
    ax.set_xlabel("rank τ")
    ax.set_ylabel(label)


def _all_racers(ax: Axes, summary: pd.DataFrame, table: pd.DataFrame, absent: pd.DataFrame) -> None:
    listed = _listed(summary).iloc[::-1]
    for place, (_, row) in enumerate(listed.iterrows()):
        marker, inside = KINDS[row.kind]
        mean, ends = 100 * row.test_accuracy, 100 * np.array([row.test_accuracy_low, row.test_accuracy_high])
        ax.errorbar(
            mean,
            place,
            xerr=[[mean - ends[0]], [ends[1] - mean]],
            fmt=marker,
            color="black",
            mfc=inside,
            markersize=4,
        )
        same = (table.racer == row.racer) & (
            table["rank"].isna() if np.isnan(row["rank"]) else table["rank"] == row["rank"]
        )
        ax.scatter(100 * table[same].test_accuracy, np.full(same.sum(), place), s=5, alpha=0.5, color="gray")
    names = [_name_with_rank(row) for _, row in listed.iterrows()]
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_ylim(-0.7, len(names) - 0.3)
    means = 100 * listed.test_accuracy
    spread = means.max() - means.quantile(0.25)
    if means.min() < means.max() - 4 * spread:  # one that diverged would squeeze the others
        ax.set_xlim(means.max() - 4 * spread, None)
    ax.set_xlabel("test accuracy (%), 95 % t interval; dots: seeds", fontsize=8)
    edge = "\n* learning rate at the edge of the grid" if listed.at_edge.any() else ""
    lost = f"\nout of reach, not installed: {', '.join(absent.label)}" if len(absent) else ""
    ax.set_title(f"full: Table 1; square: wider field; hollow: ablations{edge}{lost}", fontsize=8)


def _listed(summary: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each racer, best on the test set first, at the rank that validation prefers."""
    chosen = summary.sort_values("accuracy", ascending=False, kind="stable").drop_duplicates(["task", "racer"])
    return chosen.sort_values("test_accuracy", ascending=False, kind="stable")


def _name_with_rank(row: pd.Series) -> str:
    name = row.label if np.isnan(row["rank"]) or row.kind == "ablation" else f"{row.label}, τ = {row['rank']:.0f}"
    name = f"{name} *" if row.at_edge else name
    return f"{name} ({row.diverged} of {row.seeds} diverged)" if row.diverged else str(name)


# ---------------------------------------------------------------------------------------- the curves
def _curves(curves: pd.DataFrame, table: pd.DataFrame, rank: int) -> Figure:
    """Return for each task a row: training loss and validation accuracy, against steps and against seconds."""
    tasks = curves.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 4, panel_size=(3.1, 2.7))
    for row, task in zip(axes, tasks, strict=True):
        own = curves[(curves.task == task) & (curves["rank"].isna() | (curves["rank"] == rank))]
        for index, racer in enumerate(CURVES):
            runs = own[own.racer == racer]
            if runs.empty:
                continue
            label = str(table[table.racer == racer].label.iloc[0])
            label = f"{label}, τ = {rank}" if racer in RANKED else label
            means = runs.groupby("step")[["seconds", "train_loss", "validation_accuracy"]].mean()
            for ax, across in zip(row, (means.index, means.seconds) * 2, strict=True):
                quantity = means.train_loss if ax in row[:2] else 100 * means.validation_accuracy
                ax.plot(across, quantity, color=plots.PALETTE[index], linewidth=1.3, label=label)
        for ax in row[:2]:
            ax.set_yscale("log")
            plots.readable_log(ax.yaxis)
            ax.set_ylabel("training loss (nats)")
        for ax in row[2:]:
            ax.set_ylabel("validation accuracy (%)")
            low, high = 100 * own.validation_accuracy.quantile(0.1), 100 * own.validation_accuracy.max()
            ax.set_ylim(low, high + 0.05 * (high - low))
        for ax, name in zip(row, ("steps", "processor seconds, log scale") * 2, strict=True):
            ax.set_xlabel(name)
            if name != "steps":
                ax.set_xscale("log")
                plots.readable_log(ax.xaxis)
        row[0].set_title(task)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure
