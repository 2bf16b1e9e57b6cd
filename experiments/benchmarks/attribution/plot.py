"""LDS against damping, what removing top-ranked examples does, and where the rest goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots
from experiments.benchmarks.attribution.methods import (
    FILTER,
    INFLUENCE,
    PBRF,
    PBRF_PAPER,
    RUN_DAMPING,
    TRAK,
    UNROLLED,
)
from experiments.benchmarks.attribution.which_score import not_minimised

TOLD = "influence, damping 1/length"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return LDS over dampings and of each method at its best, of the first task; the table has all tasks."""
    table = computed["table"]
    table = table[table.task == table.task.iloc[0]]
    own = table[table.status == "done"]
    failed = table[table.status.str.startswith("failed")].method.unique().tolist()
    # A method without an LDS, which random removal is, has no row.
    best = own.loc[own.lds.dropna().groupby(own.method, sort=False).idxmax()]
    best = best.assign(method=[_label(each) for _, each in best.iterrows()])
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 2.2 + 0.2 * len(best)))
    _over_dampings(axes[0, 0], own, failed)
    other = best.assign(**{f"lds{end}": best[f"lds_other{end}"] for end in ("", "_low", "_high")})
    shown = pd.concat([best.assign(order="same order"), other.assign(order="other orders")])
    ends: dict[str, Any] = {"value": "lds", "low": "lds_low", "high": "lds_high"}
    panels.forest(axes[0, 1], shown, name="method", by="order", **ends)
    panels.frame(axes[0, 1], x="LDS at the best damping", title="retraining on halves")
    note = (
        "LDS: rank correlation of a score's predictions with retraining, of one network; error bars, bands: 95 %"
    )
    number = computed.config["num_subsets"]
    note += f"\nover {number} halves and the queries; same order: of batches, as the network's"
    panels.legend(figure, title=note)
    axes[0, 0].set_title(str(table.task.iloc[0]), loc="left")
    return {"figure.png": figure}


def _label(row: pd.Series) -> str:
    """Return a method's name with what a reader must know of its bars."""
    ridge = f", ridge {row.damping:g}" if row.method == TRAK else ""
    layers = " (some layers)" if isinstance(row.get("remark"), str) else ""
    name = TOLD if row.method == RUN_DAMPING else row.method
    return f"{name}{ridge}{layers}" + (" (not minimised)" if not_minimised(row) else "")


def _over_dampings(ax: Axes, own: pd.DataFrame, failed: list[str]) -> None:
    """Draw methods with a damping as curves, PBRF as points, others as lines across, the run's damping upright.

    TRAK's ridge is no damping of the mean, and has its place in the table. The legend names methods that failed.
    """
    bregman = own[own.method.isin((PBRF, PBRF_PAPER))]
    curves = own[own.damping.notna() & ~own.index.isin(bregman.index) & (own.method != TRAK)]
    styles = panels.styles_of([*curves.method.unique(), INFLUENCE, PBRF, FILTER, UNROLLED])
    for method, curve in curves.groupby("method", sort=False):
        look = styles[method]
        ax.fill_between(curve.damping, curve.lds_low, curve.lds_high, color=look["color"], alpha=0.15)
        ax.plot(curve.damping, curve.lds, **look, ms=4, label=method)
    places = bregman.damping.fillna(bregman.run_damping)
    errors = np.stack([bregman.lds - bregman.lds_low, bregman.lds_high - bregman.lds])
    look = {"color": styles[PBRF]["color"], "marker": "*", "ms": 8, "linestyle": "none"}
    ax.errorbar(places, bregman.lds, yerr=errors, label="PBRF", **look)
    ax.set_xscale("log")
    for method, style in ((FILTER, "--"), (UNROLLED, ":")):
        value = own[own.method == method].lds
        look = {"color": styles[method]["color"], "linestyle": style, "linewidth": 1, "label": method}
        panels.rule(ax, y=float(value.iloc[0]), **look)
    run_damping = float(own.run_damping.dropna().iloc[0])
    ax.axvline(run_damping, color="#555555", linestyle="-.", linewidth=1, zorder=0.9, label="damping 1/length")
    told = own[own.method == RUN_DAMPING]
    look = {"color": styles[INFLUENCE]["color"], "marker": "D", "ms": 8, "mec": "black", "linestyle": "none"}
    ax.plot(told.run_damping, told.lds, label=TOLD, zorder=3, **look)
    for method in failed:
        ax.plot([], [], linestyle="none", label=f"{method}: failed, see table.csv")
    ax.set_xlabel("damping")
    ax.set_ylabel("LDS, same order")
