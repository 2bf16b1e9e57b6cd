"""The Proposition: measured over stated error against n."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

TITLES = {"S": "symmetrised S", "D": "unsymmetrised D"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: measured over stated error against n, for S and D, and with λmax taken literally."""
    table = computed["table"]
    plain = table[table.delta == 0]
    figure, axes = plots.figure(1, 3, panel_size=(3.3, 3.1))
    for ax, form in zip(axes[0], TITLES, strict=False):
        _ratios(ax, plain[plain.form == form], "stated")
        ax.set_ylim(-0.04, 1.35)  # a whole mark at 0
        ax.set_title(f"{TITLES[form]}, λ spectral norm")
    axes[0, 0].set_ylabel("E‖D - H‖² / (λ² n (n - 1))")
    _ratios(axes[0, 2], plain[plain.form == "S"], "stated_with_largest")
    axes[0, 2].set_yscale("log")
    axes[0, 2].set_title("S, λ largest eigenvalue")
    plots.annotate(
        axes[0, 0],
        f"Monte Carlo - exact: at most {table.z.abs().max():.1f} s.e.\n({len(table)} settings, both forms, δ)",
    )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return {"figure.png": figure}


def _ratios(ax: Axes, table: pd.DataFrame, column: str) -> None:
    ax.axhline(1, color="#555555", linestyle="--", linewidth=1, label="as stated")
    for index, (name, own) in enumerate(table.groupby("spectrum", sort=False)):
        shown = own[own[column] > 0].sort_values("n")
        color, marker = plots.PALETTE[index % len(plots.PALETTE)], plots.MARKERS[index % len(plots.MARKERS)]
        ax.plot(shown.n, shown.exact / shown[column], color=color, linewidth=1)
        ratio, stderr = shown.measured / shown[column], shown.stderr / shown[column]
        plots.measured(ax, shown.n, ratio, stderr, color=color, marker=marker, label=str(name))
    ax.set_xscale("log")
    ax.set_xlabel("n (line: exact, points: Monte Carlo)")
