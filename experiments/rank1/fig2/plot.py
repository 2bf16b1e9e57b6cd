"""Logistic regression: gradient norms and values of all variants, and the rules for α_k."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.lab import Computed, plots
from experiments.rank1.fig2.variants import COLUMNS, SETTINGS, best_variant, variant_name

LABELS = {"gradient_norm": "‖∇f(x_k)‖", "gap": "f(x_k) - f*", "alpha": "α_k"}
FLOORS = {"gradient_norm": 1e-8, "gap": 1e-10}
AXES = {
    "step": "step k",
    "products": "Hessian products",
    "passes": "gradients + Hessian products",
    "seconds": "seconds",
}


class Curve(NamedTuple):
    """One line of a panel: its name, its rows, and whether it is drawn dashed."""

    name: str
    rows: pd.DataFrame
    dashed: bool = False


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: gradient norms, values, and the rules for α_k with what they measure."""
    table = computed["table"].merge(computed["timing"], on=[*COLUMNS, "seed"], how="left")
    table["seconds"] = table.step * table.seconds_per_step
    names = {"gradient_norm": "figure.png", "gap": "figure_loss.png"}
    figures = {names[quantity]: _figure(table, quantity) for quantity in names}
    return figures | {"figure_rules.png": _rules_figure(table, computed["cost"])}


def _figure(table: pd.DataFrame, quantity: str) -> Figure:
    figure, axes = plots.figure(3, 3, panel_size=(3.7, 3.1))
    ours = table[(table.method == "uniform direction") & (table.rule == "given")]
    one = ours[ours.num_directions == 1]
    slides = one[one.symmetrize.eq(True) & one.safeguard.eq(False)]
    plain = slides[slides.delta_scale == 0]
    single = "step k (one Hessian product each)"
    panels = [
        ("α_k = sqrt(M‖∇f‖/2) + c σ", [Curve(f"c = {c:g}", own) for c, own in _by(plain, "sigma_scale")], "step"),
        ("shift δ, σ = 0", _deltas(slides), "step"),
        ("symmetrised (S) or not (D)", _forms(one), "step"),
        *(("m directions, their own σ", _directions(ours), x) for x in ("step", "products", "seconds")),
        *(("methods", _methods(table, plain), x) for x in ("step", "passes", "seconds")),
    ]
    for index, (ax, (title, curves, x)) in enumerate(zip(axes.flat, panels, strict=True)):
        _panel(ax, curves, x, quantity)
        ax.set_title(title)
        ax.set_xlabel(single if index < 3 else AXES[x])
        ax.set_yscale("log")
        ax.set_ylim(FLOORS[quantity], 10)
    style: dict[str, Any] = {"fontsize": 7, "handlelength": 1.6, "labelspacing": 0.25}
    for ax in axes[0]:
        ax.legend(loc="lower left", framealpha=0.8, **style)
    for ax in axes[1:, -1]:  # a row shares its curves; beside it, the legend covers none of them
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, **style)
    for ax in axes[:, 0]:
        ax.set_ylabel(LABELS[quantity])
    _explain(figure)
    return figure


def _rules_figure(table: pd.DataFrame, cost: pd.DataFrame) -> Figure:
    """The rules for α_k, what they give, the constants that one of them measures, and the cost of a step."""
    figure, axes = plots.figure(2, 3, panel_size=(3.7, 3.2))
    curves = _rules(table)
    panels = {(0, 0): ("gradient_norm", "step"), (0, 1): ("gradient_norm", "products"), (0, 2): ("alpha", "step")}
    panels[1, 0] = ("gap", "step")
    for where, (quantity, x) in panels.items():
        ax = axes[where]
        _panel(ax, curves, x, quantity)
        ax.set_title("α_k itself" if quantity == "alpha" else "rules for α_k")
        ax.set_xlabel(AXES[x])
        ax.set_ylabel(LABELS[quantity])
        ax.set_yscale("log")
        if quantity in FLOORS:
            ax.set_ylim(FLOORS[quantity], 10)
    axes[0, 0].legend(fontsize=7, loc="lower left", framealpha=0.8, handlelength=1.6, labelspacing=0.25)
    _constants(axes[1, 1], table)
    _cost(axes[1, 2], cost)
    _explain(figure)
    return figure


def _explain(figure: Figure) -> None:
    """Say below a figure what lines and bands are."""
    handles: list[Artist] = [Line2D([], [], color="#555555"), Patch(color="#555555", alpha=0.15, linewidth=0)]
    labels = ["line: median over seeds of the directions", "band: smallest to largest of the seeds"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def _by(table: pd.DataFrame, column: str) -> list[tuple[float, pd.DataFrame]]:
    """Return the rows by value of a setting, largest first."""
    return [
        (float(value), table[table[column] == value]) for value in sorted(table[column].unique(), reverse=True)
    ]


def _deltas(slides: pd.DataFrame) -> list[Curve]:
    without = slides[slides.sigma_scale == 0]
    return [Curve(f"δ = {scale:g} λ" if scale else "δ = 0", own) for scale, own in _by(without, "delta_scale")]


def _forms(one: pd.DataFrame) -> list[Curve]:
    compared = one[(one.delta_scale == 0) & one.sigma_scale.isin(one[~one.symmetrize.eq(True)].sigma_scale)]
    curves = []
    for scale, own in _by(compared, "sigma_scale"):
        for symmetrize in (True, False):
            for safeguard in (False, True):
                chosen = own[(own.symmetrize == symmetrize) & (own.safeguard == safeguard)]
                name = f"{'S' if symmetrize else 'D'}, c = {scale:g}{', safeguard' if safeguard else ''}"
                curves.append(Curve(name, chosen, dashed=safeguard))
    return [curve for curve in curves if len(curve.rows)]


def _directions(ours: pd.DataFrame) -> list[Curve]:
    scale = ours[(ours.num_directions > 1)].sigma_scale.min()
    curves = []
    for count in sorted(ours.num_directions.unique()):
        own = ours[(ours.num_directions == count) & ours.symmetrize.eq(True) & (ours.delta_scale == 0)]
        curves.append(Curve(f"m = {count:g}", own[(own.sigma_scale == 1) & own.safeguard.eq(False)]))
        small = own[(own.sigma_scale == scale) & own.safeguard.eq(True)]
        curves.append(Curve(f"m = {count:g}, c = {scale:g}, safeguard", small, dashed=True))
    return [curve for curve in curves if len(curve.rows)]


def _rules(table: pd.DataFrame) -> list[Curve]:
    """Return the rules: with c in pairs, M term beside none; the measured one stands alone at the end."""
    ours = table[
        (table.method == "uniform direction")
        & (table.num_directions == 1)
        & (table.delta_scale == 0)
        & table.symmetrize.eq(True)
        & table.safeguard.eq(False)
    ]
    constant = ours[ours.rule == "constant"]
    curves = []
    for scale, own in _by(constant, "sigma_scale"):
        curves.append(Curve(f"M term + {scale:g} σ", ours[(ours.rule == "given") & (ours.sigma_scale == scale)]))
        curves.append(Curve(f"{scale:g} σ alone", own, dashed=True))
    return [*curves, Curve("M term + σ, both measured", ours[ours.rule == "measured"])]


def _methods(table: pd.DataFrame, plain: pd.DataFrame) -> list[Curve]:
    best = best_variant(table)
    chosen = table.merge(best[SETTINGS].drop_duplicates(), on=SETTINGS)
    descent = table[table.method == "gradient descent"]
    tuned = descent.sort_values("step").groupby("lr_factor").gap.last().idxmin()
    curves = [
        Curve("lemma", plain[plain.sigma_scale == 1]),
        Curve(f"best: {variant_name(best)}", chosen),
        Curve("GD, 1/λ", descent[descent.lr_factor == 1], dashed=True),
        Curve(f"GD, {tuned:g}/λ", descent[descent.lr_factor == tuned], dashed=True),
    ]
    return curves + [Curve(name, table[table.method == name], dashed=True) for name in ("Newton", "cubic Newton")]


def _panel(ax: Axes, curves: list[Curve], x: str, quantity: str) -> None:
    """Draw medians over seeds, with the range between the seeds as a band; x on a log axis, 0 at its left end."""
    in_pairs = [curve.dashed for curve in curves[:2]] == [False, True]
    positive = min(curve.rows[x][curve.rows[x] > 0].min() for curve in curves)
    for index, curve in enumerate(curves):
        color = plots.PALETTE[(index // 2 if in_pairs else index) % len(plots.PALETTE)]
        values = curve.rows.pivot_table(index="step", columns="seed", values=quantity)
        values = values.clip(lower=FLOORS.get(quantity))
        axis = curve.rows.groupby("step")[x].median().reindex(values.index).clip(lower=positive / 2)
        style = "--" if curve.dashed else "-"
        # A step that costs many products is paid before it is taken: no slanted line from one point to the next.
        paid = "default" if x == "step" else "steps-post"
        ax.plot(
            axis,
            values.median(axis=1),
            color=color,
            linestyle=style,
            linewidth=1.2,
            label=curve.name,
            drawstyle=paid,
        )
        if values.shape[1] > 1:
            step = None if x == "step" else "post"
            low, high = values.min(axis=1), values.max(axis=1)
            ax.fill_between(axis, low, high, color=color, alpha=0.15, linewidth=0, step=step)  # type: ignore[arg-type]
    ax.set_xscale("log")


def _constants(ax: Axes, table: pd.DataFrame) -> None:
    """Draw λ and M as measured along the path over the global constants."""
    measured = table[table.rule == "measured"]
    given = table[table.rule == "given"].iloc[0]
    names = {"hessian_lipschitz": "M, finite differences", "spectral_norm": "λ, Lanczos"}
    for index, (column, name) in enumerate(names.items()):
        values = measured.pivot_table(index="step", columns="seed", values=column) / given[column]
        steps = values.index.to_series().clip(lower=0.5)
        color = plots.PALETTE[index]
        ax.plot(steps, values.median(axis=1), color=color, linewidth=1.2, label=name)
        ax.fill_between(steps, values.min(axis=1), values.max(axis=1), color=color, alpha=0.15, linewidth=0)
    ax.axhline(1, color="#555555", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(AXES["step"])
    ax.set_ylabel("measured / global constant")
    ax.set_title("constants, as measured so far")
    ax.legend(fontsize=7)


def _cost(ax: Axes, cost: pd.DataFrame) -> None:
    for index, (method, own) in enumerate(cost.groupby("method", sort=False)):
        ax.plot(
            own.n, own.seconds, marker=plots.MARKERS[index], markersize=4, color=plots.PALETTE[index], label=method
        )
    steps = cost[cost.method.str.startswith("step")]
    last = steps[steps.n == steps.n.max()].iloc[-1]
    sizes = np.array([steps.n.min(), steps.n.max()])
    ax.plot(sizes, last.seconds * sizes / last.n, color="#555555", linestyle=":", label="proportional to n")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("n")
    ax.set_ylabel("CPU seconds")
    ax.set_title("cost of a step, diagonal Hessian")
    ax.legend(fontsize=7)
