"""App. G, plot: error and correlation against cost, seconds of a step against N, the s_test trick."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots, t_interval

FLOOR = 1e-7  # of 1 - correlation: below it is rounding
TITLES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return errors against cost for each matrix, the s_test trick and the seconds of a step beside the first."""
    curves, states = computed["curves"], computed["states"]
    step_time, s_test = (computed.get(name, pd.DataFrame()) for name in ("step_time", "s_test"))
    panels = list(curves.groupby(["task", "curvature"], sort=False))
    extra = not (step_time.empty and s_test.empty)
    figure, axes = plots.figure(2, len(panels) + extra, panel_size=(3.0, 2.7))
    styles = _styles(curves.method.unique().tolist())
    for column, ((task, curvature), own) in enumerate(panels):
        _curves(axes[0, column], own, "error", styles)
        _curves(axes[1, column], own, "correlation", styles)
        chosen = states[(states.task == task) & (states.curvature == curvature)]
        seeds = own.seed.nunique()
        title = f"{task}\n{TITLES[str(curvature)]}, damping {chosen.damping.mean():.2g}, {_seeds(seeds)}"
        axes[0, column].set_title(title, fontsize=9)
        axes[1, column].set_xlabel("products for each system")
    axes[0, 0].set_ylabel("relative error")
    axes[1, 0].set_ylabel("1 - correlation of scores")
    if extra:
        _step_time(axes[0, -1], step_time)
        _s_test(axes[1, -1], s_test)
    handles = [axes[0, 0].plot([], [], **style, label=_label(curves, name))[0] for name, style in styles.items()]
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=len(styles), frameon=False, fontsize=8
    )
    legend.set_title(
        "median over the systems, mean over seeds with 95 % of t; "
        "a batch counts as |B| / N of a product, which is not time"
    )
    legend.get_title().set_fontsize(8)
    return {"figure.png": figure}


def _label(curves: pd.DataFrame, method: str) -> str:
    """Return the method's name, with its seeds where in every panel there are fewer than of others."""
    own = curves[curves.method == method].groupby(["task", "curvature"]).seed.nunique()
    fewer = own < curves.groupby(["task", "curvature"]).seed.nunique().reindex(own.index)
    return f"{method} ({_seeds(int(own.max()))})" if fewer.all() else method


def _seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


def _styles(methods: list[str]) -> dict[str, dict]:
    looks = panels.styles_of(method.partition(",")[0] for method in methods)
    return {
        method: {
            "color": looks[method.partition(",")[0]]["color"],
            "linestyle": "--" if method.startswith("LiSSA, 1") else "-",
        }
        for method in methods
    }


def _curves(ax: Axes, own: pd.DataFrame, quantity: str, styles: dict[str, dict]) -> None:
    """Draw a line for each method: the median system, mean over seeds of its logarithm, with 95 % of t."""
    for method, curve in own.groupby("method", sort=False):
        grid = _grid(curve)
        values = np.array([_at(rows, quantity, grid) for _, rows in curve.groupby("seed")])
        if quantity == "correlation":
            values = np.clip(1 - values, FLOOR, None)
        logs = np.log(values)
        mean = np.exp(logs.mean(0))
        ax.plot(grid, mean, linewidth=1.3, **styles[str(method)])
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


def _step_time(ax: Axes, table: pd.DataFrame) -> None:
    """Milliseconds of a step against N, means over repeats with 95 %."""
    if table.empty:
        ax.set_axis_off()
        return
    styles = panels.styles_of(table.step.unique())
    for step, own in table.groupby("step", sort=False):
        by_size = own.groupby("N").milliseconds
        label = f"{step}, {'whole data' if step == 'CG' else 'a batch'}"
        means, bars = by_size.mean(), by_size.sem()
        plots.measured(ax, means.index, means, bars, label=label, **styles[step])
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("training examples N")
    ax.set_ylabel("milliseconds of a step")
    ax.set_title(f"time of a step\n{table.task.iloc[0]}", fontsize=9)
    ax.legend(fontsize=8)
    plots.readable_log(ax.xaxis)


def _s_test(ax: Axes, table: pd.DataFrame) -> None:
    """Ratio of seconds, by training points over by s_test, against N / N_test, with 95 % of t over seeds."""
    if table.empty:
        ax.set_axis_off()
        return
    ratios = table.assign(ratio=table["seconds by training points"] / table["seconds by s_test"])
    for index, (task, own) in enumerate(ratios.groupby("task", sort=False)):
        by_size = own.assign(sizes=own.N / own.N_test).groupby("sizes").ratio
        half = by_size.apply(_half_width)
        ax.errorbar(
            by_size.mean().index,
            by_size.mean(),
            yerr=half,
            color=plots.PALETTE[index],
            marker=plots.MARKERS[index],
            markersize=4,
            linestyle="none",
            label=str(task),
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("N / N_test")
    ax.set_ylabel("ratio of seconds")
    ax.set_title("solving for training points\nagainst for test points (s_test)", fontsize=9)
    plots.identity_line(ax)
    ax.legend(fontsize=7, loc="lower right")
    plots.readable_log(ax.xaxis)
    plots.readable_log(ax.yaxis)


def _half_width(values: pd.Series) -> float:
    interval = t_interval(values)
    return (interval.high - interval.low) / 2
