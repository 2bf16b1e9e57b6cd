"""App. G, plot: error and correlation against cost, seconds of a step against N, the s_test trick."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots, t_interval
from experiments.pbrf.appg.summary import CORRELATION

FLOOR = 1e-7  # of 1 - correlation: below it is rounding
NOTE = (
    "median over the systems, mean over seeds with 95 % of t; dotted: good enough\n"
    "a batch counts as |B| / N of a product, which is not time"
)
TITLES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return errors against cost of the first network and matrix, and of all."""
    curves, states = computed["curves"], computed["states"]
    places = list(curves.groupby(["task", "curvature"], sort=False))
    styles = {str(name): style for name, style in panels.styles_of(curves.method.unique()).items()}
    figures = {}
    for name, shown, height in (("figure.png", places[:1], 3.8), ("figure_more.png", places, 2.4)):
        figure, axes = plots.figure(len(shown), 2, panel_size=(3.8, height))
        for row, ((task, curvature), own) in zip(axes, shown, strict=True):
            _curves(row[0], own, "correlation", styles)
            _curves(row[1], own, "error", styles)
            panels.rule(row[0], y=1 - CORRELATION, linestyle=":")
            chosen = states[(states.task == task) & (states.curvature == curvature)]
            title = f"{task}, {TITLES[str(curvature)]}, damping {chosen.damping.mean():.2g}"
            row[0].set_title(f"{title}, {_seeds(own.seed.nunique())}", fontsize=9, loc="left")
            for ax, label in zip(row, ("1 − correlation of scores", "relative error"), strict=True):
                panels.frame(ax, x="products with the whole data", y=label)
        handles = [
            axes[0, 0].plot([], [], **style, label=_label(curves, name))[0] for name, style in styles.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, title=NOTE)
        figures[name] = figure
    return figures


def _label(curves: pd.DataFrame, method: str) -> str:
    """Return the method's name, with its seeds where in every panel there are fewer than of others."""
    own = curves[curves.method == method].groupby(["task", "curvature"]).seed.nunique()
    fewer = own < curves.groupby(["task", "curvature"]).seed.nunique().reindex(own.index)
    return f"{method} ({_seeds(int(own.max()))})" if fewer.all() else method


def _seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


def _curves(ax: Axes, own: pd.DataFrame, quantity: str, styles: dict[str, dict]) -> None:
    """Draw a line for each method: the median system, mean over seeds of its logarithm, with 95 % of t."""
    for method, curve in own.groupby("method", sort=False):
        grid = _grid(curve)
        values = np.array([_at(rows, quantity, grid) for _, rows in curve.groupby("seed")])
        if quantity == "correlation":
            values = np.clip(1 - values, FLOOR, None)
        logs = np.log(values)
        mean = np.exp(logs.mean(0))
        ax.plot(grid, mean, linewidth=1.3, **styles[str(method)] | {"marker": ""})
        ax.plot(grid[-1:], mean[-1:], marker="o", markersize=4, color=styles[str(method)]["color"])
        if len(values) >= 2:
            ends = [t_interval(column) for column in logs.T]
            low, high = (np.exp([getattr(end, side) for end in ends]) for side in ("low", "high"))
            ax.fill_between(grid, low, high, color=styles[str(method)]["color"], alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    if quantity == "error":
        ax.set_ylim(top=3)
    else:
        ax.set_ylim(FLOOR / 2, 3)


def _grid(curve: pd.DataFrame) -> np.ndarray:
    """Return costs at which every seed has an iterate, from the latest first one to the earliest last one."""
    by_seed = curve.groupby("seed").work
    first, last = by_seed.min().max(), by_seed.max().min()
    longest = curve[curve.seed == curve.groupby("seed").work.size().idxmax()].work.to_numpy()
    return np.unique([first, *longest[(longest > first) & (longest < last)], last])


def _at(rows: pd.DataFrame, quantity: str, grid: np.ndarray) -> np.ndarray:
    places = np.searchsorted(rows.work.to_numpy() * (1 - 1e-9), grid, side="right") - 1
    return rows[quantity].to_numpy()[places]
