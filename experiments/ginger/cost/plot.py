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
ERRORS = {
    ("common", "inverse_error"): "inverse",
    ("common", "matrix_error"): "matrix",
    ("common", "direction_error"): "direction",
    ("own", "inverse_error"): "inverse, own targets",
}

HEADLINE = {
    ("common", "inverse_error"): "inverse, the same target",
    ("own", "inverse_error"): "inverse, own targets",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures: approximation errors over ranks; exact statements and theory; cost."""
    return {
        "figure.png": _approximation(_headline(computed["table"]), HEADLINE, (3.8, 4.2)),
        "figure_all.png": _approximation(computed["table"], ERRORS, (2.9, 2.7)),
        "figure_theory.png": _theory(computed),
        "figure_cost.png": _cost(computed),
    }


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


def _approximation(
    table: pd.DataFrame, errors: Mapping[tuple[str, str], str], size: tuple[float, float]
) -> Figure:
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
    figure, rows = panels.rows(table, by="row", columns=len(errors), panel_size=size, sharex=True)
    for axes, place, own in rows:
        for ax, ((target, error), title) in zip(axes, errors.items(), strict=True):
            of_target = own[own.target == target]
            panels.lines(ax, of_target, x="rank", y=error, by="label", styles=styles)
            panels.rule(ax, y=1, linestyle=":")
            _rank_axis(ax, of_target["rank"])
            ax.set_ylim(bottom=0)
            panels.frame(ax, x="rank τ: vectors kept", title=f"relative error: {title}", size=9)
        axes[0].set_ylabel(place, fontsize=8)
    note = "G: the moving average; target α^τ I + G but for “own targets”\nmean over seeds, band: 95 % t interval"
    panels.legend(figure, title=note, columns=2)
    return figure


# ------------------------------------------------------------------------------------ exact statements, theory
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
    middle = np.sort(printed.damping.unique())[printed.damping.nunique() // 2]
    shown = printed[printed.damping == middle]
    shown = shown.assign(label=shown.stream + ", α = " + shown.decay.map("{:g}".format))
    panels.lines(ax, shown, x="updates", y="value", by="label")
    ours = exact[exact.statement == "moving-average"].value.max()
    title = f"Algorithm 1 as printed\n(α-factors mended: at most {ours:.0e})"
    panels.frame(ax, x="updates (room for all)", y="relative error of the inverse", title=title)
    ax.set_ylim(0, (1.1 + 0.19 * shown.label.nunique()) * printed.value.max())  # room for the legend
    ax.legend(fontsize=7, loc="upper left")


def _precision(ax: Axes, precision: pd.DataFrame) -> None:
    names = {"inverse": "inverse kept (the paper)", "matrix": "matrix kept (ours)"}
    for damping, lost in precision[~np.isfinite(precision.inverse)].groupby("damping"):
        names["inverse"] += f"\n{len(lost)} broke down at γ = {damping:g}"
    styles = panels.styles_of(names.values())
    for column, name in names.items():
        finite = precision[np.isfinite(precision[column])]
        panels.scatter(ax, finite, x="damping", y=column, identity=False, label=name, styles=styles, size=8)
        medians = finite.groupby("damping")[column].median()
        ax.plot(medians.index, medians, color=styles[name]["color"], linewidth=1.2)
    panels.frame(ax, x="damping γ", y="relative error of the direction", title="single precision", log="xy")
    ax.set_ylim(top=200 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=7, loc="upper right")


def _rank(ax: Axes, exact: pd.DataFrame) -> None:
    ranks = exact[exact.statement == "qng-rank"]
    bound = np.minimum(ranks["rank"], ranks.updates)
    top = float(bound.max())
    for factor, style, label in ((2, ":", "Observation 1: 2 min(τ, t)"), (1, "--", "min(τ, t)")):
        ax.plot([0, top], [0, factor * top], color=panels.GREY, linestyle=style, linewidth=1, label=label)
    ax.scatter(bound, ranks.value * bound, color=STYLES["QNG"]["color"], marker="s", s=18, label="measured")
    panels.frame(ax, x="min(τ, t)", y="rank", title="QNG: A Aᵀ less its multiple of I")
    ax.legend(fontsize=7)


def _eigenvalues(ax: Axes, eigenvalues: pd.DataFrame) -> None:
    for index, (damping, own) in enumerate(eigenvalues.groupby("damping", sort=False)):
        color = plots.PALETTE[index]
        ax.plot(own.updates, own.largest, color=color, marker="^", markersize=4, label=f"γ = {damping:g}")
        ax.plot(own.updates, own.smallest, color=color, marker="v", markersize=4)
        ax.plot(own.updates, 1 / (own.damping + own.sigma_bound), color=color, linestyle=":")
        panels.rule(ax, y=1 / own.damping.iloc[0], color=color, linewidth=0.8)
    title = "Lemma 1: λmax = 1/γ (dashed)\nλmin above its bound (dotted)"
    panels.frame(ax, x="updates", y="eigenvalues of G⁻¹", title=title, log="xy")
    ax.legend(fontsize=7, loc="center right", bbox_to_anchor=(1, 0.78))  # between the eigenvalues


def _descent(ax: Axes, descent: pd.DataFrame) -> None:
    sides = descent.assign(right=descent.decrease + descent.noise, step=descent.t + 1)
    medians = sides.groupby(["damping", "step"], sort=False)[["right", "left"]].median().reset_index()
    for index, (damping, own) in enumerate(medians.groupby("damping", sort=False)):
        for side, style in (("right", "--"), ("left", "-")):
            look: dict[str, Any] = {"color": plots.PALETTE[index], "marker": "o" if side == "left" else ""}
            panels.lines(ax, own, x="step", y=side, label=f"{side}, γ = {damping:g}", linestyle=style, **look)
    panels.frame(ax, x="step t + 1", y="nats, median over seeds", title="Lemma 2, both sides", log="xy")
    ax.legend(fontsize=7)


def _convergence(ax: Axes, convergence: pd.DataFrame) -> None:
    for index, (damping, own) in enumerate(convergence.groupby("damping", sort=False)):
        look: dict[str, Any] = {"color": plots.PALETTE[index], "marker": ""}
        panels.traces(ax, own, x="T", y="squared_gradient", color=look["color"], alpha=0.4)
        means = own.groupby("T")[["squared_gradient", "bound"]].mean().reset_index()
        panels.lines(ax, means, x="T", y="squared_gradient", label=f"inf ‖∇L‖², γ = {damping:g}", **look)
        bound = f"Eq. 27 (times λmin), γ = {damping:g}"
        panels.lines(ax, means, x="T", y="bound", label=bound, linestyle="--", **look)
    panels.frame(ax, x="steps T", title="Theorem 1, step sizes ∝ 1/t", log="xy")
    ax.legend(fontsize=6, loc="lower right", bbox_to_anchor=(1, 0.2))


# ------------------------------------------------------------------------------------ cost
def _cost(computed: Computed) -> Figure:
    figure, axes = plots.figure(2, 3, panel_size=(3.4, 2.9))
    _flops(axes[0, 0], computed["flops"])
    _own_flops(axes[0, 1], computed["flops"])
    _steps(axes[0, 2], computed["steps"])
    scaling, fits = computed["scaling"], computed["fits"]
    _against_size(axes[1, 0], scaling, fits)
    _time_against_rank(axes[1, 1], scaling, fits)
    _memory_against_rank(axes[1, 2], scaling)
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
    ax.legend(fontsize=6, ncols=2, loc="upper left")


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
    ax.legend(fontsize=6, loc="upper left")


def _steps(ax: Axes, steps: pd.DataFrame) -> None:
    names = steps.optimizer + steps["rank"].map(lambda rank: "" if np.isnan(rank) else f" {rank:g}")
    names = names + steps.forward.map({"shared": "", "own": ", own\nforward pass"}).fillna("")
    steps = steps.assign(name=steps.network + "\n" + names)[steps.optimizer != "Adam"]
    quantities = {"flops_to_adam": "FLOPs", "memory_to_adam": "memory", "seconds_to_adam": "seconds"}
    groups = steps.groupby("name", sort=False)[list(quantities)]
    shown = groups.mean().join(groups.min().add_suffix("_low")).join(groups.max().add_suffix("_high"))
    panels.bars(ax, shown.reset_index(), name="name", value=quantities)
    ax.tick_params(axis="y", labelsize=6)
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
    ax.legend(fontsize=6)


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
    ax.legend(fontsize=6)


def _memory_against_rank(ax: Axes, scaling: pd.DataFrame) -> None:
    counted = scaling.assign(vectors=scaling.peak_bytes / (4 * scaling.num_parameters))
    own = counted[(counted.sweep == "rank") & (counted.repeat == 0)]
    panels.lines(ax, own, x="rank", y="vectors", by="optimizer", styles=STYLES)
    adam = counted[(counted.sweep == "size") & (counted.optimizer == "Adam")].iloc[-1]
    panels.rule(ax, y=adam.vectors, color=STYLES["Adam"]["color"], linestyle="-", label="Adam")
    ax.set_ylim(bottom=0)
    panels.frame(ax, x="rank τ", y="peak, in vectors of parameters", title="memory of update and step")
    ax.legend(fontsize=7)
