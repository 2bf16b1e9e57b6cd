"""Mushrooms, plot: drawn from the saved tables alone.

python -m experiments.rank1.fig2_plot results/rank1/fig2/embedded
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.rank1.fig2_claims import best_variant, variant_name
from experiments.rank1.redraw import redraw

LABELS = {"gradient_norm": "‖∇f(x_k)‖", "gap": "f(x_k) - f*"}
FLOORS = {"gradient_norm": 1e-8, "gap": 1e-10}


class Curve(NamedTuple):
    """One line of a panel: its name, its rows, and whether it is a method of others."""

    name: str
    rows: pd.DataFrame
    dashed: bool = False


def draw(table: pd.DataFrame, timing: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures by file name: gradient norms, and values."""
    columns = ["method", *_SETTINGS, "lr_factor", "seed"]
    table = table.merge(timing, on=columns, how="left")
    table["seconds"] = table.step * table.seconds_per_step
    names = {"gradient_norm": "figure.png", "gap": "figure_loss.png"}
    return {names[quantity]: _figure(table, quantity) for quantity in names}


def _figure(table: pd.DataFrame, quantity: str) -> Figure:
    figure, axes = plots.figure(2, 3, panel_size=(3.6, 3.3))
    ours = table[table.method == "uniform direction"]
    one = ours[ours.num_directions == 1]
    slides = one[one.symmetrize.astype(bool) & ~one.safeguard.astype(bool)]
    plain = slides[slides.delta_scale == 0]
    panels = [
        ("α_k = sqrt(M‖∇f‖/2) + c σ", [Curve(f"c = {c:g}", own) for c, own in _by(plain, "sigma_scale")], "step"),
        ("shift δ, σ = 0", _deltas(slides), "step"),
        ("symmetrised or not", _forms(one), "step"),
        ("m directions, their own σ", _directions(ours), "step"),
        ("methods, by passes over the data", _methods(table, plain), "passes"),
        ("methods, by time", _methods(table, plain), "seconds"),
    ]
    for ax, (title, curves, x) in zip(axes.flat, panels, strict=True):
        _panel(ax, curves, x, quantity)
        ax.set_title(title)
    for ax in axes[:, 0]:
        ax.set_ylabel(LABELS[quantity])
    return figure


_SETTINGS = ["sigma_scale", "delta_scale", "num_directions", "symmetrize", "safeguard"]


def _by(table: pd.DataFrame, column: str) -> list[tuple[float, pd.DataFrame]]:
    """Return the rows by value of a setting, largest first."""
    return [
        (float(value), table[table[column] == value]) for value in sorted(table[column].unique(), reverse=True)
    ]


def _deltas(slides: pd.DataFrame) -> list[Curve]:
    without = slides[slides.sigma_scale == 0]
    return [Curve(f"δ = {scale:g} λ", own) for scale, own in _by(without, "delta_scale")]


def _forms(one: pd.DataFrame) -> list[Curve]:
    compared = one[(one.delta_scale == 0) & one.sigma_scale.isin(one[~one.symmetrize.astype(bool)].sigma_scale)]
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
        own = ours[(ours.num_directions == count) & ours.symmetrize.astype(bool) & (ours.delta_scale == 0)]
        curves.append(Curve(f"m = {count:g}", own[(own.sigma_scale == 1) & ~own.safeguard.astype(bool)]))
        small = own[(own.sigma_scale == scale) & own.safeguard.astype(bool)]
        curves.append(Curve(f"m = {count:g}, c = {scale:g}", small, dashed=True))
    return [curve for curve in curves if len(curve.rows)]


def _methods(table: pd.DataFrame, plain: pd.DataFrame) -> list[Curve]:
    best = best_variant(table)
    chosen = table.merge(best[_SETTINGS].drop_duplicates(), on=_SETTINGS)
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
    """Draw medians over seeds, with the range between the seeds as a band."""
    pairs = [curve.dashed for curve in curves] == [False, True] * (len(curves) // 2)
    for index, curve in enumerate(curves):
        color = plots.PALETTE[(index // 2 if pairs else index) % len(plots.PALETTE)]
        values = curve.rows.pivot_table(index="step", columns="seed", values=quantity).clip(lower=FLOORS[quantity])
        axis = curve.rows.groupby("step")[x].median().reindex(values.index)
        style = "--" if curve.dashed else "-"
        ax.plot(axis, values.median(axis=1), color=color, linestyle=style, linewidth=1.2, label=curve.name)
        if values.shape[1] > 1:
            ax.fill_between(axis, values.min(axis=1), values.max(axis=1), color=color, alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(FLOORS[quantity], 10)
    ax.set_xlabel({"step": "step k", "passes": "gradients + Hessian products", "seconds": "seconds"}[x])
    ax.legend(fontsize=7, loc="lower left", frameon=True, framealpha=0.8, handlelength=1.6, labelspacing=0.25)


def main() -> None:
    """Redraw the figures of a result folder."""
    redraw(draw, "table.csv", "timing.csv")


if __name__ == "__main__":
    main()
