"""Operations, memory and time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

COLORS: dict[Any, str] = {"Ginger": plots.PALETTE[0], "QNG": plots.PALETTE[1], "Adam": plots.PALETTE[2]}
GREY = "#555555"


def draw_cost(computed: Computed) -> Figure:
    """Return one figure: counted operations, measured steps, time against P, time and memory against τ."""
    figure, axes = plots.figure(2, 3, panel_size=(3.4, 2.9))
    _flops(axes[0, 0], computed["flops"])
    _own_flops(axes[0, 1], computed["flops"])
    _steps(axes[0, 2], computed["steps"])
    scaling, fits = computed["scaling"], computed["fits"]
    _against_size(axes[1, 0], scaling, fits)
    _time_against_rank(axes[1, 1], scaling, fits)
    _memory_against_rank(axes[1, 2], scaling)
    return figure


def _rank_axis(ax: Axes, ranks: pd.Series) -> None:
    shown = sorted(ranks.dropna().unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(shown, [f"{rank:g}" for rank in shown])
    ax.set_xlabel("rank τ")


def _flops(ax: Axes, flops: pd.DataFrame) -> None:
    own = flops[(flops.network == "ResNet-18") & flops["rank"].notna()]
    for kind, rows in own.groupby("optimizer", sort=False):
        color = COLORS[kind]
        shared = rows[rows.forward == "shared"]
        ax.plot(
            shared["rank"],
            shared.paper_to_adam,
            color=color,
            linestyle=":",
            marker="x",
            label=f"{kind}, the paper",
        )
        ax.plot(
            shared["rank"], shared.to_adam, color=color, marker="o", markersize=4, label=f"{kind}, forward shared"
        )
        apart = rows[rows.forward == "own"]
        ax.plot(apart["rank"], apart.to_adam, color=color, linestyle="--", label=f"{kind}, forward of its own")
    ax.axhline(1, color=GREY, linewidth=0.8)
    _rank_axis(ax, own["rank"])
    ax.set_ylim(bottom=0)
    ax.set_ylabel("FLOPs of a step / Adam's")
    ax.set_title(f"ResNet-18, batch of {own.batch_size.iloc[0]}")
    ax.legend(fontsize=6)


def _own_flops(ax: Axes, flops: pd.DataFrame) -> None:
    own = flops[(flops.network == "ResNet-18") & (flops.forward == "shared")]
    adam = flops[(flops.network == "ResNet-18") & (flops.optimizer == "Adam")].paper_flops.iloc[0]
    for kind, rows in own.groupby("optimizer", sort=False):
        ax.plot(
            rows["rank"], rows.own_flops, color=COLORS[kind], marker="o", markersize=4, label=f"{kind}, counted"
        )
        printed = rows.dropna(subset="paper_flops")
        ax.plot(
            printed["rank"],
            printed.paper_flops - adam,
            color=COLORS[kind],
            linestyle=":",
            marker="x",
            label=f"{kind}, the paper's less Adam's,\nsecond gradient included",
        )
    last = own[own.optimizer == "Ginger"].iloc[-1]
    ranks = np.array(sorted(own["rank"].unique()))
    ax.plot(
        ranks, last.own_flops * (ranks / last["rank"]) ** 2, color=GREY, linewidth=1, linestyle="--", label="τ²"
    )
    _rank_axis(ax, own["rank"])
    ax.set_yscale("log")
    ax.set_ylabel("FLOPs of update and step")
    ax.set_title("the optimizer's own products")
    ax.set_ylim(top=200 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=6, loc="upper left")


def _steps(ax: Axes, steps: pd.DataFrame) -> None:
    quantities = {"flops_to_adam": "FLOPs", "memory_to_adam": "memory", "seconds_to_adam": "seconds"}
    names = steps.optimizer + steps["rank"].map(lambda rank: "" if np.isnan(rank) else f" {rank:g}")
    names = names + steps.forward.map({"shared": "", "own": ", own\nforward pass"}).fillna("")
    labels = steps.network + "\n" + names
    shown = [label for label in labels.unique() if not label.endswith("\nAdam")]
    width = 0.8 / len(quantities)
    for index, (column, name) in enumerate(quantities.items()):
        groups = [steps[labels == label][column] for label in shown]
        means = np.array([group.mean() for group in groups])
        ends = np.array([[group.min() for group in groups], [group.max() for group in groups]])
        spread = np.clip([means - ends[0], ends[1] - means], 0, None)  # rounding, where all are the same
        places = np.arange(len(shown)) + (1 - index) * width
        ax.barh(places, means, height=width, xerr=spread, color=plots.PALETTE[index], label=name)
    ax.set_yticks(np.arange(len(shown)), shown, fontsize=6)
    ax.axvline(1, color=GREY, linewidth=0.8)
    ax.axvline(2, color=GREY, linewidth=0.8, linestyle="--")
    ax.set_ylim(len(shown) + 0.6, -0.6)  # from the top down, and room for the legend
    ax.set_xlabel("of a training step / Adam's")
    ax.set_title("training steps as measured")
    ax.legend(fontsize=7, loc="lower left", ncols=3)


def _against_size(ax: Axes, scaling: pd.DataFrame, fits: pd.DataFrame) -> None:
    own = scaling[scaling.sweep == "size"]
    lines = fits[(fits.sweep == "size") & (fits.quantity == "milliseconds")]
    for kind, rows in own.groupby("optimizer", sort=False):
        fit = lines[lines.optimizer == kind].mean(numeric_only=True)
        ax.scatter(rows.num_parameters, rows.milliseconds, s=10, color=COLORS[kind])
        sizes = np.linspace(rows.num_parameters.min(), rows.num_parameters.max(), 50)
        label = f"{kind}: {1e6 * fit.linear:.1f} ns a parameter, R² = {fit.r_squared:.4f}"
        ax.plot(sizes, fit.intercept + fit.linear * sizes, color=COLORS[kind], linewidth=1, label=label)
    rank = own["rank"].dropna().iloc[0]
    ax.set_xlabel("parameters P")
    ax.set_ylabel("milliseconds")
    ax.set_title(f"update and step, τ = {rank:g}")
    ax.legend(fontsize=6)


def _time_against_rank(ax: Axes, scaling: pd.DataFrame, fits: pd.DataFrame) -> None:
    own = scaling[scaling.sweep == "rank"]
    lines = fits[(fits.sweep == "rank") & (fits.quantity == "milliseconds") & (fits.degree == 2)]
    ranks = np.linspace(own["rank"].min(), own["rank"].max(), 100)
    for kind, rows in own.groupby("optimizer", sort=False):
        ax.scatter(rows["rank"], rows.milliseconds, s=10, color=COLORS[kind])
        if (lines.optimizer == kind).any():
            fit = lines[lines.optimizer == kind].mean(numeric_only=True)
            curve = fit.intercept + fit.linear * ranks + fit.square * ranks**2
            label = f"{kind}: {fit.intercept:.2g} + {fit.linear:.2g} τ {fit.square:+.1g} τ²"
            ax.plot(ranks, curve, color=COLORS[kind], linewidth=1, label=label)
    ax.set_xlabel("rank τ")
    ax.set_ylabel("milliseconds")
    ax.set_title(f"update and step, P = {own.num_parameters.iloc[0]:,}")
    ax.legend(fontsize=6)


def _memory_against_rank(ax: Axes, scaling: pd.DataFrame) -> None:
    own = scaling[(scaling.sweep == "rank") & (scaling.repeat == 0)]
    vector = 4 * own.num_parameters
    for kind, rows in own.groupby("optimizer", sort=False):
        vectors = rows.peak_bytes / vector.loc[rows.index]
        ax.plot(rows["rank"], vectors, color=COLORS[kind], marker="o", markersize=4, label=kind)
    adam = scaling[(scaling.sweep == "size") & (scaling.optimizer == "Adam")].iloc[-1]
    ax.axhline(adam.peak_bytes / (4 * adam.num_parameters), color=COLORS["Adam"], linewidth=1, label="Adam")
    ax.set_xlabel("rank τ")
    ax.set_ylabel("peak, in vectors of parameters")
    ax.set_ylim(bottom=0)
    ax.set_title("memory of update and step")
    ax.legend(fontsize=7)
