"""LDS against damping, what removing top-ranked examples does, and where the rest goes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.benchmarks.attribution.methods import FILTER, PBRF, PBRF_PAPER, TRAK, UNROLLED
from experiments.benchmarks.attribution.which_score import not_minimised


def draw(computed: Computed) -> dict[str, Figure]:
    """Return a row of panels for each task, and the chain of approximations of each task."""
    return {
        "figure.png": _scores(computed["table"]),
        "figure_rest.png": _rest(computed["rest"], computed["part_way"]),
    }


def _scores(table: pd.DataFrame) -> Figure:
    """Return for each task: LDS over dampings, in both kinds of order; rise after removal."""
    done = table[table.status == "done"]
    tasks = done.task.unique().tolist()
    rows = max(done[done.task == task].method.nunique() for task in tasks)
    figure, axes = plots.figure(len(tasks), 3, panel_size=(3.9, 1.2 + 0.24 * rows))
    for row, task in zip(axes, tasks, strict=True):
        own = done[done.task == task]
        failed = table[(table.task == task) & table.status.str.startswith("failed")].method.unique().tolist()
        _over_dampings(row[0], own, failed)
        # A method without an LDS, which random removal is, stands with its one row.
        best = own.loc[own.lds.fillna(-np.inf).groupby(own.method, sort=False).idxmax()]
        best = best.assign(method=[_label(each) for _, each in best.iterrows()])
        _bars(row[1], best, {"lds": "same order", "lds_other": "other orders"}, "LDS at the best damping")
        removals = [name for name in best if name.startswith("removal_") and name.count("_") == 1]
        labels = {name: f"top {name.removeprefix('removal_')} %" for name in removals}
        _bars(row[2], best, labels, "rise of a test loss after removal")
        row[0].set_title(task, loc="left")
        for ax in row[2:]:
            ax.set_yticklabels([])
    return figure


def _label(row: pd.Series) -> str:
    """Return a method's name with what a reader must know of its bars."""
    ridge = f", ridge {row.damping:g}" if row.method == TRAK else ""
    layers = " (some layers)" if isinstance(row.get("remark"), str) else ""
    return f"{row.method}{ridge}{layers}" + (" (not minimised)" if not_minimised(row) else "")


def _over_dampings(ax: Axes, own: pd.DataFrame, failed: list[str]) -> None:
    """Draw methods with a damping as curves, PBRF as points, others as lines across, the run's damping upright.

    TRAK's ridge is no damping of the mean, and has its place in the table. The legend names methods that failed.
    """
    bregman = own[own.method.isin((PBRF, PBRF_PAPER))]
    curves = own[own.damping.notna() & ~own.index.isin(bregman.index) & (own.method != TRAK)]
    for index, (method, curve) in enumerate(curves.groupby("method", sort=False)):
        color = plots.PALETTE[index]
        ax.fill_between(curve.damping, curve.lds_low, curve.lds_high, color=color, alpha=0.15)
        ax.plot(curve.damping, curve.lds, color=color, marker=plots.MARKERS[index], ms=4, label=method)
    places = bregman.damping.fillna(bregman.run_damping)
    errors = np.stack([bregman.lds - bregman.lds_low, bregman.lds_high - bregman.lds])
    ax.errorbar(
        places, bregman.lds, yerr=errors, color=plots.PALETTE[-1], marker="*", ms=8, linestyle="none", label="PBRF"
    )
    ax.set_xscale("log")
    for method, style in ((FILTER, "--"), (UNROLLED, ":")):
        value = own[own.method == method].lds
        ax.axhline(float(value.iloc[0]), color="black", linestyle=style, linewidth=1, label=method)
    run_damping = float(own.run_damping.dropna().iloc[0])
    ax.axvline(run_damping, color="#555555", linestyle="-.", linewidth=1, zorder=0.9, label="damping 1/(ηT)")
    for method in failed:
        ax.plot([], [], linestyle="none", label=f"{method}: failed, see table.csv")
    ax.set_xlabel("damping")
    ax.set_ylabel("LDS, same order")
    _legend_below(ax)


def _bars(ax: Axes, best: pd.DataFrame, columns: dict[str, str], label: str) -> None:
    known = {column: name for column, name in columns.items() if column in best}
    places = np.arange(len(best))
    height = 0.8 / max(1, len(known))
    for index, (column, name) in enumerate(known.items()):
        values = best[column].to_numpy()
        errors = np.abs(np.stack([values - best[f"{column}_low"], best[f"{column}_high"] - values]))
        offset = (index - (len(known) - 1) / 2) * height
        ax.barh(
            places + offset, values, height, xerr=errors, color=plots.PALETTE[index], label=name, ecolor="#444444"
        )
    ax.set_yticks(places, best.method)
    ax.set_ylim(len(best) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(label)
    ax.legend(
        fontsize=7,
        frameon=False,
        ncol=len(known) or 1,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.1,
    )


def _legend_below(ax: Axes) -> None:
    ax.legend(fontsize=7, frameon=False, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _rest(rest: pd.DataFrame, part_way: pd.DataFrame) -> Figure:
    """Return for each task: LDS of each predictor, over training steps where there are several; over the way."""
    tasks = rest.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 2, panel_size=(6.2, 2.7), width_ratios=(1.25, 1))
    order = list(dict.fromkeys([*part_way.predictor, *rest.predictor]))  # one colour for each in all panels
    for (ax, way), task in zip(axes, tasks, strict=True):
        own = rest[rest.task == task]
        if own.num_steps.nunique() > 1:
            _over_steps(ax, own.sort_values("num_steps"), order)
        else:
            _bars(
                ax,
                own.rename(columns={"predictor": "method"}),
                {"lds": "retraining on halves", "lds_part_way": "retraining, weights moved part of the way"},
                "LDS, same order",
            )
        rows_of_legend = -(-len(ax.get_legend_handles_labels()[0]) // 2)
        ax.set_title(task, loc="left", pad=6 + 12 * rows_of_legend)
        _curves(way, part_way[part_way.task == task], "share", order)
        way.set_xlim(0, 1.03)
        way.set_xlabel("share of the way to the weights of a half")
    return figure


def _over_steps(ax: Axes, own: pd.DataFrame, order: list[str]) -> None:
    _curves(ax, own, "num_steps", order)
    ax.set_xscale("log")
    plots.readable_log(ax.xaxis)
    ax.set_xlabel("steps of training")


def _curves(ax: Axes, own: pd.DataFrame, over: str, order: list[str]) -> None:
    """Draw the LDS of each predictor with its interval, in the colour of its place in `order`."""
    for name, curve in own.groupby("predictor", sort=False):
        index = order.index(str(name))
        color, marker = plots.PALETTE[index], plots.MARKERS[index]
        ax.fill_between(curve[over], curve.lds_low, curve.lds_high, color=color, alpha=0.12)
        ax.plot(curve[over], curve.lds, color=color, marker=marker, ms=4, label=name)
    ax.set_ylabel("LDS, same order")
    ax.legend(fontsize=7, frameon=False, ncol=2, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
