"""What the figures of overfitting share: curves over epochs, and where the validation loss is smallest."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from curvlab.reporting import plots


def draw_losses(ax: Axes, own: pd.DataFrame, name: str, style: dict[str, Any]) -> None:
    """Draw one optimizer's training and validation loss."""
    _draw_mean(ax, own, "train_loss", style, label=f"{name}, training")
    _draw_mean(ax, own, "validation_loss", style, label=f"{name}, validation", linestyle="--")


def draw_estimates(ax: Axes, own: pd.DataFrame, quantity: str, style: dict[str, Any], **kind: Any) -> None:
    """Draw the mean over every seed; its marker is filled where all of them are valid, hollow elsewhere."""
    _draw_mean(ax, own, quantity, {**style, "marker": "none"}, **kind)
    mean = own.groupby("epoch")[quantity].mean()
    valid = own.groupby("epoch").valid.agg(lambda flags: bool(flags.astype(bool).all()))
    for subset, face in ((mean[valid], style["color"]), (mean[~valid], "white")):
        marks = {"marker": style["marker"], "edgecolors": style["color"], "linewidths": 0.9, "zorder": 3}
        ax.scatter(subset.index, subset, s=18, facecolors=face, **marks)


def mark_minimum(ax: Axes, own: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw a vertical line at each seed's epoch of smallest validation loss."""
    for epoch in own.loc[own.groupby("seed").validation_loss.idxmin()].epoch.unique():
        ax.axvline(epoch, color=style["color"], linestyle=":", linewidth=1, zorder=0.9)


def _draw_mean(ax: Axes, own: pd.DataFrame, column: str, style: dict[str, Any], **kind: Any) -> None:
    mean = own.groupby("epoch")[column].mean()
    ax.plot(mean.index, mean, markersize=3.5, linewidth=1.2, **{**style, **kind})
    plots.seeds_around_mean(ax, own.epoch, own[column], color=style["color"])
