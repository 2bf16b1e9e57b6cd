"""Who is closer; what holds exactly; what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots, t_interval
from experiments.ginger.cost.plot_cost import draw_cost

BLUE, RED, GREEN = plots.PALETTE[:3]
COLORS: dict[Any, str] = {"Ginger": BLUE, "QNG": RED, "best": GREEN}
NAMES: dict[Any, str] = {"Ginger": "Ginger", "QNG": "QNG", "best": "moving average itself, cut to rank τ"}
PANELS = {
    ("common", "inverse_error"): "inverse",
    ("common", "matrix_error"): "matrix",
    ("common", "direction_error"): "direction",
    ("own", "inverse_error"): "inverse, own targets",
}
GREY = "#555555"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures: approximation errors over ranks; exact statements and theory; cost."""
    return {
        "figure.png": _approximation(computed["table"]),
        "figure_theory.png": _theory(computed),
        "figure_cost.png": draw_cost(computed),
    }


def _approximation(table: pd.DataFrame) -> Figure:
    places = table[["task", "decay"]].drop_duplicates().to_numpy().tolist()
    figure, axes = plots.figure(len(places), len(PANELS), panel_size=(2.9, 2.7), sharex=True)
    for row, (task, decay) in zip(axes, places, strict=True):
        own = table[(table.task == task) & (table.decay == decay)]
        for ax, ((target, error), title) in zip(row, PANELS.items(), strict=True):
            _errors(ax, own[own.target == target], error)
            if ax in axes[0]:
                ax.set_title(f"relative error: {title}", fontsize=9)
            if ax in axes[-1]:
                ax.set_xlabel("rank τ: vectors kept")
        row[0].set_ylabel(f"{task}\nα = {decay:g}", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    more, names = axes[0, -1].get_legend_handles_labels()
    legend = figure.legend(
        [*handles, *more], [*labels, *names], loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    legend.set_title(
        "target α^τ I + G but for the last column, G the moving average; mean over seeds, 95 % t interval"
    )
    return figure


def _errors(ax: Axes, table: pd.DataFrame, error: str) -> None:
    for index, ((optimizer, damping), own) in enumerate(table.groupby(["optimizer", _damping(table)], sort=False)):
        by_rank = own.groupby("rank")[error]
        means = by_rank.mean()
        ends = [t_interval(values.to_numpy()) for _, values in by_rank]
        style = "-"
        label = NAMES[optimizer]
        if (table.target == "own").all():
            style = "-" if optimizer == "QNG" else (":", "--", "-.")[index % 3]
            label = f"{optimizer}, target {'αᵗ' if optimizer == 'QNG' else damping} I + G"
        color, marker = COLORS[optimizer], plots.MARKERS[list(COLORS).index(optimizer)]
        ax.plot(
            means.index,
            means,
            linestyle=style,
            marker=marker,
            markersize=4,
            color=color,
            linewidth=1.2,
            label=label,
        )
        ax.fill_between(
            means.index,
            [end.low for end in ends],
            [end.high for end in ends],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(table["rank"].unique()), [f"{rank}" for rank in sorted(table["rank"].unique())])
    ax.set_ylim(bottom=0)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")


def _damping(table: pd.DataFrame) -> pd.Series:
    """Return what tells lines of one optimizer apart: γ of its own target."""
    return table.damping.where(table.target == "own", "")


def _theory(computed: Computed) -> Figure:
    figure, axes = plots.figure(2, 3, panel_size=(3.3, 2.8))
    _printed(axes[0, 0], computed["exact"])
    _precision(axes[0, 1], computed["precision"])
    _rank(axes[0, 2], computed["exact"])
    _eigenvalues(axes[1, 0], computed["eigenvalues"])
    _descent(axes[1, 1], computed["descent"])
    _convergence(axes[1, 2], computed["convergence"])
    return figure


def _printed(ax: Axes, exact: pd.DataFrame) -> None:
    printed = exact[exact.statement == "algorithm-1"]
    for index, ((stream, decay), own) in enumerate(printed.groupby(["stream", "decay"], sort=False)):
        dampings = np.sort(own.damping.unique())
        one = own[own.damping == dampings[len(dampings) // 2]]
        ax.plot(
            one.updates,
            one.value,
            color=plots.PALETTE[index],
            marker=plots.MARKERS[index],
            markersize=3,
            linewidth=1.2,
            label=f"{stream}, α = {decay:g}",
        )
    ours = exact[exact.statement == "moving-average"].value.max()
    ax.set_xlabel("updates (room for all)")
    ax.set_ylabel("relative error of the inverse")
    ax.set_title(f"Algorithm 1 as printed\n(α-factors mended: at most {ours:.0e})")
    rows = len(ax.lines)
    ax.set_ylim(0, (1.1 + 0.19 * rows) * printed.value.max())  # room for the legend
    ax.legend(fontsize=7, loc="upper left")


def _precision(ax: Axes, precision: pd.DataFrame) -> None:
    names = {"inverse": "inverse kept (the paper)", "matrix": "matrix kept (ours)"}
    for damping, lost in precision[~np.isfinite(precision.inverse)].groupby("damping"):
        names["inverse"] += f"\n{len(lost)} broke down at γ = {damping:g}"
    for index, (column, name) in enumerate(names.items()):
        finite = precision[np.isfinite(precision[column])]
        medians = finite.groupby("damping")[column].median()
        color = (RED, BLUE)[index]
        ax.scatter(finite.damping, finite[column], s=8, color=color, alpha=0.5)
        ax.plot(medians.index, medians, color=color, linewidth=1.2, label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("damping γ")
    ax.set_ylabel("relative error of the direction")
    ax.set_title("single precision")
    ax.set_ylim(top=200 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=7, loc="upper right")


def _rank(ax: Axes, exact: pd.DataFrame) -> None:
    ranks = exact[exact.statement == "qng-rank"]
    bound = np.minimum(ranks["rank"], ranks.updates)
    top = float(bound.max())
    ax.plot([0, top], [0, 2 * top], color=GREY, linestyle=":", label="Observation 1: 2 min(τ, t)")
    ax.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1, label="min(τ, t)")
    ax.scatter(bound, ranks.value * bound, color=RED, marker="s", s=18, label="measured")
    ax.set_xlabel("min(τ, t)")
    ax.set_ylabel("rank")
    ax.set_title("QNG: A Aᵀ less its multiple of I")
    ax.legend(fontsize=7)


def _eigenvalues(ax: Axes, eigenvalues: pd.DataFrame) -> None:
    for index, (damping, own) in enumerate(eigenvalues.groupby("damping", sort=False)):
        color = plots.PALETTE[index]
        ax.plot(own.updates, own.largest, color=color, marker="^", markersize=4, label=f"γ = {damping:g}")
        ax.plot(own.updates, own.smallest, color=color, marker="v", markersize=4)
        ax.plot(own.updates, 1 / (own.damping + own.sigma_bound), color=color, linestyle=":")
        ax.axhline(1 / own.damping.iloc[0], color=color, linestyle="--", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("updates")
    ax.set_ylabel("eigenvalues of G⁻¹")
    ax.set_title("Lemma 1: λmax = 1/γ (dashed)\nλmin above its bound (dotted)")
    ax.legend(fontsize=7, loc="center right", bbox_to_anchor=(1, 0.78))  # between the eigenvalues


def _descent(ax: Axes, descent: pd.DataFrame) -> None:
    for index, (damping, own) in enumerate(descent.groupby("damping", sort=False)):
        color = plots.PALETTE[index]
        right = (own.decrease + own.noise).groupby(own.t).median()
        left = own.left.groupby(own.t).median()
        ax.plot(right.index + 1, right, color=color, linestyle="--", label=f"right, γ = {damping:g}")
        ax.plot(left.index + 1, left, color=color, marker="o", markersize=3, label=f"left, γ = {damping:g}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("step t + 1")
    ax.set_ylabel("nats, median over seeds")
    ax.set_title("Lemma 2, both sides")
    ax.legend(fontsize=7)


def _convergence(ax: Axes, convergence: pd.DataFrame) -> None:
    for index, (damping, own) in enumerate(convergence.groupby("damping", sort=False)):
        color = plots.PALETTE[index]
        for _, run in own.groupby("seed"):
            ax.plot(run["T"], run.squared_gradient, color=color, alpha=0.4, linewidth=0.8)
        means = own.groupby("T")[["squared_gradient", "scaled", "bound"]].mean()
        ax.plot(means.index, means.squared_gradient, color=color, label=f"inf ‖∇L‖², γ = {damping:g}")
        ax.plot(
            means.index, means.bound, color=color, linestyle="--", label=f"Eq. 27 (times λmin), γ = {damping:g}"
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("steps T")
    ax.set_title("Theorem 1, step sizes ∝ 1/t")
    ax.legend(fontsize=6, loc="lower right", bbox_to_anchor=(1, 0.2))
