"""Who is closer; what holds exactly; what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots

STYLES = panels.styles_of(["Ginger", "QNG", "Adam", "moving average itself, cut to rank τ"])
ERRORS = {"common": "inverse, the same target", "own": "inverse, own targets"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures: approximation errors over ranks; and cost."""
    headline = _approximation(_headline(computed["table"]))
    return {"figure.png": headline, "figure_more.png": _cost(computed)}


def _rank_axis(ax: Axes, ranks: pd.Series) -> None:
    shown = sorted(ranks.dropna().unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(shown, [f"{rank:g}" for rank in shown])


# ------------------------------------------------------------------------------------ approximation
def _headline(table: pd.DataFrame) -> pd.DataFrame:
    """Return the first task at the decay of the paper's runs, with the published damping alone."""
    own = table[(table.task == table.task.iloc[0]) & (table.decay == table.decay.max())]
    dampings = pd.to_numeric(own.damping, errors="coerce")
    return own[
        (own.target == "common") | (own.optimizer == "QNG") | (dampings == dampings[own.target == "own"].min())
    ]


def _approximation(table: pd.DataFrame) -> Figure:
    names = table.optimizer.replace({"best": "moving average itself, cut to rank τ"})
    targets = table.damping.where(table.damping == "α^t", "target " + table.damping.astype(str) + " I + G")
    own_names = table.optimizer + ", " + targets.replace({"α^t": "target αᵗ I + G"})
    table = table.assign(label=names.where(table.target == "common", own_names))
    table = table.assign(row=table.task + "\nα = " + table.decay.map("{:g}".format))
    styles = dict(STYLES)
    for index, name in enumerate(table.label[(table.target == "own")].unique()):
        styles[name] = styles[name.split(",")[0]] | {
            "linestyle": "-" if name.startswith("Q") else (":", "--", "-.")[index % 3]
        }
    figure, rows = panels.rows(table, by="row", columns=len(ERRORS), panel_size=(3.8, 4.2), sharex=True)
    for axes, place, own in rows:
        for ax, (target, title) in zip(axes, ERRORS.items(), strict=True):
            of_target = own[own.target == target]
            panels.lines(ax, of_target, x="rank", y="inverse_error", by="label", styles=styles)
            panels.rule(ax, y=1, linestyle=":")
            _rank_axis(ax, of_target["rank"])
            ax.set_ylim(bottom=0)
            panels.frame(ax, x="rank τ: vectors kept", title=f"relative error: {title}", size=9)
        axes[0].set_ylabel(place, fontsize=8)
    number = panels.seeds(table.groupby("task").seed.nunique())
    note = f"mean over {number}, band: 95 % t interval; dotted: an inverse of zero\n"
    note += "G: the moving average; target α^τ I + G but for “own targets”"
    panels.legend(figure, title=note, columns=2)
    return figure


# ------------------------------------------------------------------------------------ cost
def _cost(computed: Computed) -> Figure:
    figure, axes = plots.figure(3, 2, panel_size=(4.0, 3.2))
    _flops(axes[0, 0], computed["flops"])
    _own_flops(axes[0, 1], computed["flops"])
    scaling, fits = computed["scaling"], computed["fits"]
    _against_size(axes[1, 0], scaling, fits)
    _time_against_rank(axes[1, 1], scaling, fits)
    _memory_against_rank(axes[2, 0], scaling)
    _steps(axes[2, 1], computed["steps"])
    return figure


def _by_rank(ax: Axes, rows: pd.DataFrame, value: str, entries: Mapping[str, str], **look: Any) -> None:
    """Draw a column against the rank for both optimizers, with these legend entries."""
    for kind, label in entries.items():
        own, style = rows[rows.optimizer == kind], {label: STYLES[kind]}
        panels.lines(ax, own, x="rank", y=value, label=label, styles=style, **look)
    _rank_axis(ax, rows["rank"])


def _flops(ax: Axes, flops: pd.DataFrame) -> None:
    own = flops[(flops.network == "ResNet-18") & flops["rank"].notna()]
    kinds = ("QNG", "Ginger")
    shared, apart = (own[own.forward == way] for way in ("shared", "own"))
    _by_rank(
        ax, shared, "paper_to_adam", {kind: f"{kind}, the paper" for kind in kinds}, linestyle=":", marker="x"
    )
    _by_rank(ax, shared, "to_adam", {kind: f"{kind}, forward shared" for kind in kinds})
    entries = {kind: f"{kind}, forward of its own" for kind in kinds}
    _by_rank(ax, apart, "to_adam", entries, linestyle="--", marker="")
    panels.rule(ax, y=1, linestyle="-")
    title = f"ResNet-18, batch of {own.batch_size.iloc[0]}"
    panels.frame(ax, x="rank τ", y="FLOPs of a step / Adam's", title=title)
    ax.set_ylim(0, 1.6 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=7.5, ncols=2, loc="upper left")


def _own_flops(ax: Axes, flops: pd.DataFrame) -> None:
    own = flops[(flops.network == "ResNet-18") & (flops.forward == "shared")]
    adam = flops[(flops.network == "ResNet-18") & (flops.optimizer == "Adam")].paper_flops.iloc[0]
    own = own.assign(paper=own.paper_flops - adam)
    _by_rank(ax, own, "own_flops", {kind: f"{kind}, counted" for kind in ("QNG", "Ginger")})
    entries = {kind: f"{kind}, the paper's less Adam's,\nsecond gradient included" for kind in ("QNG", "Ginger")}
    _by_rank(ax, own, "paper", entries, linestyle=":", marker="x")
    last = own[own.optimizer == "Ginger"].iloc[-1]
    ranks = np.array(sorted(own["rank"].unique()))
    square = last.own_flops * (ranks / last["rank"]) ** 2
    ax.plot(ranks, square, color=panels.GREY, linewidth=1, linestyle="--", label="τ²")
    title = "the optimizer's own products"
    panels.frame(ax, x="rank τ", y="FLOPs of update and step", title=title, log="y")
    ax.set_ylim(top=200 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=7.5, loc="upper left")


def _steps(ax: Axes, steps: pd.DataFrame) -> None:
    names = steps.optimizer + steps["rank"].map(lambda rank: "" if np.isnan(rank) else f" {rank:g}")
    names = names + steps.forward.map({"shared": "", "own": ", own\nforward pass"}).fillna("")
    steps = steps.assign(name=steps.network + "\n" + names)[steps.optimizer != "Adam"]
    quantities = {"flops_to_adam": "FLOPs", "memory_to_adam": "memory", "seconds_to_adam": "seconds"}
    groups = steps.groupby("name", sort=False)[list(quantities)]
    shown = groups.mean().join(groups.min().add_suffix("_low")).join(groups.max().add_suffix("_high"))
    panels.bars(ax, shown.reset_index(), name="name", value=quantities)
    ax.tick_params(axis="y", labelsize=7.5)
    panels.rule(ax, x=1, linestyle="-")
    panels.rule(ax, x=2)
    ax.set_ylim(len(shown) + 0.6, -0.6)  # room for the legend
    panels.frame(ax, x="of a training step / Adam's", title="training steps as measured")
    ax.legend(fontsize=7, loc="lower left", ncols=3)


def _against_size(ax: Axes, scaling: pd.DataFrame, fits: pd.DataFrame) -> None:
    own = scaling[scaling.sweep == "size"]
    lines = fits[(fits.sweep == "size") & (fits.quantity == "milliseconds")]
    sizes = np.linspace(own.num_parameters.min(), own.num_parameters.max(), 50)
    for kind, rows in own.groupby("optimizer", sort=False):
        fit, color = lines[lines.optimizer == kind].mean(numeric_only=True), STYLES[kind]["color"]
        label = f"{kind}: {1e6 * fit.linear:.1f} ns a parameter, R² = {fit.r_squared:.4f}"
        ax.scatter(rows.num_parameters, rows.milliseconds, s=10, color=color)
        ax.plot(sizes, fit.intercept + fit.linear * sizes, color=color, linewidth=1, label=label)
    title = f"update and step, τ = {own['rank'].dropna().iloc[0]:g}"
    panels.frame(ax, x="parameters P", y="milliseconds", title=title)
    ax.legend(fontsize=7.5)


def _time_against_rank(ax: Axes, scaling: pd.DataFrame, fits: pd.DataFrame) -> None:
    own = scaling[scaling.sweep == "rank"]
    lines = fits[(fits.sweep == "rank") & (fits.quantity == "milliseconds") & (fits.degree == 2)]
    ranks = np.linspace(own["rank"].min(), own["rank"].max(), 100)
    for kind, rows in own.groupby("optimizer", sort=False):
        color = STYLES[kind]["color"]
        ax.scatter(rows["rank"], rows.milliseconds, s=10, color=color)
        if (lines.optimizer == kind).any():
            fit = lines[lines.optimizer == kind].mean(numeric_only=True)
            label = f"{kind}: {fit.intercept:.2g} + {fit.linear:.2g} τ {fit.square:+.1g} τ²"
            curve = fit.intercept + fit.linear * ranks + fit.square * ranks**2
            ax.plot(ranks, curve, color=color, linewidth=1, label=label)
    title = f"update and step, P = {own.num_parameters.iloc[0]:,}"
    panels.frame(ax, x="rank τ", y="milliseconds", title=title)
    ax.legend(fontsize=7.5)


def _memory_against_rank(ax: Axes, scaling: pd.DataFrame) -> None:
    counted = scaling.assign(vectors=scaling.peak_bytes / (4 * scaling.num_parameters))
    own = counted[(counted.sweep == "rank") & (counted.repeat == 0)]
    panels.lines(ax, own, x="rank", y="vectors", by="optimizer", styles=STYLES)
    adam = counted[(counted.sweep == "size") & (counted.optimizer == "Adam")].iloc[-1]
    panels.rule(ax, y=adam.vectors, color=STYLES["Adam"]["color"], linestyle="-", label="Adam")
    ax.set_ylim(bottom=0)
    panels.frame(ax, x="rank τ", y="peak, in vectors of parameters", title="memory of update and step")
    ax.legend(fontsize=7)
