"""LDS against damping, and what removing top-ranked examples does."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.target import Computed


def draw(computed: Computed) -> dict[str, Figure]:
    """Return a row of panels for each task: LDS over dampings, in both kinds of order; rise after removal."""
    done = computed["table"]
    done = done[done.status == "done"]
    tasks = done.task.unique().tolist()
    rows = max(done[done.task == task].method.nunique() for task in tasks)
    figure, axes = plots.figure(len(tasks), 3, panel_size=(3.6, 0.9 + 0.24 * rows))
    for row, task in zip(axes, tasks, strict=True):
        own = done[done.task == task]
        _over_dampings(row[0], own)
        best = own.loc[own.groupby("method", sort=False).lds.idxmax()]
        _bars(row[1], best, {"lds": "same order", "lds_other": "other orders"}, "LDS at the best damping")
        removals = [name for name in best if name.startswith("removal_") and name.count("_") == 1]
        labels = {name: f"top {name.removeprefix('removal_')} %" for name in removals}
        _bars(row[2], best, labels, "rise of a test loss after removal")
        row[0].set_title(task, loc="left")
        for ax in row[2:]:
            ax.set_yticklabels([])
    return {"figure.png": figure}


def _over_dampings(ax: Axes, own: pd.DataFrame) -> None:
    """Draw methods with a damping as curves, the others as lines across."""
    curves = own[own.damping.notna()]
    for index, (method, curve) in enumerate(curves.groupby("method", sort=False)):
        ax.fill_between(curve.damping, curve.lds_low, curve.lds_high, color=plots.PALETTE[index], alpha=0.15)
        ax.plot(
            curve.damping, curve.lds, color=plots.PALETTE[index], marker=plots.MARKERS[index], ms=4, label=method
        )
    ax.set_xscale("log")
    for index, method in enumerate(("filter of the run", "unrolled")):
        value = own[own.method == method].lds
        style = ("--", ":")[index]
        ax.axhline(float(value.iloc[0]), color="black", linestyle=style, linewidth=1, label=method)
    ax.set_xlabel("damping")
    ax.set_ylabel("LDS, same order")
    ax.legend(fontsize=7, frameon=False)


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
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(label)
    ax.legend(fontsize=7, frameon=False)
