"""Fig. 3, drawn from table.csv alone.

python -m experiments.ngd.fig3_plot results/ngd/fig3/embedded
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.reporting import plots, t_interval

PANELS = {"alpha": "smoothing α", "epsilon": "floor ε"}
QUANTITIES = {"llc": "LLC", "train_loss": "training loss (nats)"}


def draw(table: pd.DataFrame) -> Figure:
    """Return LLC (above) and training loss (below) against alpha (left) and epsilon (right), SGD as a band."""
    figure, axes = plots.figure(2, 2, panel_size=(3.8, 2.6), sharex="col", sharey="row")
    for column, (sweep, label) in zip(axes.T, PANELS.items(), strict=True):
        own, sgd = table[table.sweep == sweep], table[table.sweep == "sgd"]
        for ax, quantity in zip(column, QUANTITIES, strict=True):
            _draw_sweep(ax, own, quantity)
            _draw_band(ax, sgd[quantity].dropna().to_numpy())
            ax.set_xscale("log")
        left_out = own[own.llc.isna() & own.estimate.notna()]
        column[0].scatter(
            left_out.value,
            left_out.estimate,
            s=22,
            facecolors="none",
            edgecolors=plots.PALETTE[1],
            marker=plots.MARKERS[1],
            label="NGD, not converged or not valid",
        )
        column[1].set_yscale("log")
        plots.readable_log(column[1].yaxis)
        column[1].set_xlabel(label)
    for ax, label in zip(axes[:, 0], QUANTITIES.values(), strict=True):
        ax.set_ylabel(label)
    named = {
        label: handle for ax in axes[:, 0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    legend = figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    legend.set_title("mean over seeds, 95 % t interval; dots: seeds", prop=FontProperties(size=8))
    return figure


def _draw_sweep(ax: Axes, own: pd.DataFrame, quantity: str) -> None:
    counted = own.dropna(subset=quantity)
    means = counted.groupby("value")[quantity].mean()
    ends = [t_interval(rows[quantity].to_numpy()) for _, rows in counted.groupby("value")]
    errors = np.array([means - [end.low for end in ends], [end.high for end in ends] - means])
    style: dict[str, Any] = {"color": plots.PALETTE[1], "marker": plots.MARKERS[1]}
    ax.errorbar(means.index, means, yerr=errors, capsize=3, markersize=5, linewidth=1.2, label="NGD", **style)
    ax.scatter(counted.value, counted[quantity], s=6, alpha=0.5, color=plots.PALETTE[1])


def _draw_band(ax: Axes, values: np.ndarray) -> None:
    if not len(values):
        return
    interval = t_interval(values)
    ax.axhline(values.mean(), color=plots.PALETTE[0], linewidth=1.2, linestyle="--", label="SGD")
    if np.isfinite(interval.low):
        ax.axhspan(interval.low, interval.high, color=plots.PALETTE[0], alpha=0.15, linewidth=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Redraw the figure of a result folder from its table.csv.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "table.csv")).savefig(folder / "figure.png", dpi=110, metadata={"Software": None})
