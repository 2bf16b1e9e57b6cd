"""Fig. 1 in other settings: the tuning, both quantities against the training loss, NGD over SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import plots
from experiments.ngd.fig1.networks import network_name
from experiments.ngd.fig1.tuned_and_matched import QUANTITIES, TunedAndMatched

NAMES = ("sgd", "ngd")


def draw_tuned_and_matched(found: TunedAndMatched, settings: pd.DataFrame) -> Figure:
    """Return one row for each network: the tuning, LLC and tr(H) against training loss, NGD over SGD.

    Args:
        found: what was compared.
        settings: `found.settings()`.
    """
    networks = found.networks()
    figure, axes = plots.figure(len(networks), 4, panel_size=(3.3, 2.8))
    for row, network in zip(axes, networks, strict=True):
        own, tuning = found.at(found.equal, network), found.at(found.tuning, network)
        for index, name in enumerate(NAMES):
            style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
            _draw_tuning(row[0], tuning[tuning.optimizer == name], name, style)
            of_optimizer = own[own.optimizer == name]
            _draw_against_loss(row[1], of_optimizer, "llc", of_optimizer.valid, style)
            _draw_against_loss(row[2], of_optimizer, "trace", of_optimizer.trace.notna(), style)
        row[0].set_title(network_name(*network))
        row[0].set_xscale("log")
        row[0].set_yscale("log")
        for axis in (row[0].xaxis, row[0].yaxis, row[1].xaxis, row[2].xaxis):
            plots.readable_log(axis)
        row[0].set_xlabel("learning rate")
        row[0].set_ylabel("validation loss (nats)")
        row[1].set_ylabel("LLC from the minimum")
        row[2].set_ylabel("tr(H) (nats/parameter²)")
        _draw_settings(row[3], found.at(settings, network))
    axes[0, 1].set_title("at one lr, along training; hollow: not valid", fontsize=8)
    axes[0, 3].set_title("95 % t interval over seeds", fontsize=8)
    pairs = [ax.get_legend_handles_labels() for ax in (axes[0, 0], axes[0, 3])]
    handles, labels = ([*first, *second] for first, second in zip(*pairs, strict=True))
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    legend.set_title("line: mean over seeds; ring: the lr chosen", prop=FontProperties(size=8))
    return figure


def _draw_tuning(ax: Axes, own: pd.DataFrame, name: str, style: dict[str, Any]) -> None:
    means = own.groupby("lr").validation_loss.agg(lambda losses: losses.mean(skipna=False))
    ax.plot(means.index, means, markersize=4, linewidth=1.2, label=name, **style)
    ax.scatter(own.lr, own.validation_loss, s=6, alpha=0.5, **style)
    taken = means[means.index.isin(own[own.chosen].lr)]
    ax.scatter(taken.index, taken, s=110, facecolors="none", edgecolors=style["color"], linewidths=1.2)


def _draw_against_loss(
    ax: Axes, own: pd.DataFrame, quantity: str, counts: pd.Series, style: dict[str, Any]
) -> None:
    counts = counts.astype(bool)
    ax.scatter(own[counts].train_loss, own[counts][quantity], s=14, **style)
    ax.scatter(
        own[~counts].train_loss,
        own[~counts][quantity],
        s=14,
        facecolors="none",
        edgecolors=style["color"],
        marker=style["marker"],
        linewidths=0.7,
    )
    ax.set_xscale("log")
    ax.set_xlabel("training loss (nats)")


def _draw_settings(ax: Axes, settings: pd.DataFrame) -> None:
    names = settings.setting.unique().tolist()
    for index, (quantity, label) in enumerate(QUANTITIES.items()):
        own = settings[settings.quantity == quantity]
        places = np.arange(len(names)) + 0.12 * (index - 0.5)
        errors = 100 * np.array([own.relative_difference - own.low, own.high - own.relative_difference])
        ax.errorbar(
            100 * own.relative_difference,
            places,
            xerr=errors,
            linestyle="none",
            marker=plots.MARKERS[index + 2],
            color=plots.PALETTE[index + 2],
            capsize=3,
            markersize=5,
            label=label,
        )
    ax.axvline(0, color="#555555", linewidth=1, linestyle="--")
    ax.set_yticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("NGD over SGD − 1 (%)")
