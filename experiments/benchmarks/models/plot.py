"""Three panels: memory, time, rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.benchmarks.models.claims import SMALLEST_RISE

AIM, TIME_AIM = 1.2, 1.6
_PALE = 0.35
PRECISIONS = ("fp32", "bf16", "fp16")


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one figure, a line for each model."""
    table, rounding = computed["table"], computed["rounding"]
    models = table.model.tolist()
    figure, axes = plots.figure(1, 3, panel_size=(3.7, 1.6 + 0.28 * len(models)), sharey=True)
    places = np.arange(len(models))
    _draw_memory(axes[0, 0], table, places)
    _draw_time(axes[0, 1], table, places)
    _draw_rounding(axes[0, 2], rounding, models)
    axes[0, 0].set_yticks(places, models)
    axes[0, 0].set_ylim(len(models) - 0.5, -0.5)
    for ax in axes[0]:
        ax.grid(axis="y", visible=False)
    return {"figure.png": figure}


def _draw_memory(ax: Axes, table: pd.DataFrame, places: np.ndarray) -> None:
    measured = table.gradient_rise_mib >= SMALLEST_RISE
    ax.barh(
        places[measured],
        table.memory_ratio[measured],
        0.6,
        color=plots.PALETTE[0],
        label="product / gradient step",
    )
    if not measured.all():
        pale: dict[str, Any] = {"alpha": _PALE, "label": f"the same, not judged: below {SMALLEST_RISE:g} MiB"}
        ax.barh(places[~measured], table.memory_ratio[~measured], 0.6, color=plots.PALETTE[0], **pale)
    for column, marker, label in (
        ("low_memory_ratio", plots.MARKERS[1], "product with low_memory / gradient step"),
        ("plain_ratio", plots.MARKERS[0], "product / gradient step by plain attention"),
        ("differences_ratio", plots.MARKERS[2], "product by finite differences"),
    ):
        if column not in table:  # older than low_memory
            continue
        ax.plot(
            table[column],
            places,
            marker=marker,
            color=plots.PALETTE[4],
            markersize=5,
            linestyle="none",
            label=label,
        )
    ax.axvline(AIM, color="black", linestyle="--", linewidth=1, label=f"aim, {AIM:g}")
    ax.set_title("memory of a product /\nof a gradient step", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _draw_time(ax: Axes, table: pd.DataFrame, places: np.ndarray) -> None:
    for shift, column, color, label in (
        (-0.2, "time_to_floor", plots.PALETTE[2], "product"),
        (0.2, "low_memory_time_to_floor", plots.PALETTE[1], "product with low_memory"),
    ):
        ends = [table[column] - table[f"{column}_low"], table[f"{column}_high"] - table[column]]
        ax.barh(places + shift, table[column], 0.38, color=color, xerr=ends, capsize=2, label=label)
    ax.axvline(TIME_AIM, color="black", linestyle="--", linewidth=1, label=f"aim, {TIME_AIM:g}")
    ax.axvline(1.0, color="black", linewidth=1, label="floor")
    ax.set_title("time of a product / (two forwards\n+ a gradient), t 95 % over rounds", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _draw_rounding(ax: Axes, rounding: pd.DataFrame, models: list[str]) -> None:
    own = rounding[(rounding.matrix == "Gauss-Newton") & (rounding.status == "done")]
    for index, precision in enumerate(PRECISIONS):
        for one_batch in (True, False):
            some = own[(own.precision == precision) & ((own.batches == 1) == one_batch)]
            ax.plot(
                some.error, [models.index(model) for model in some.model], marker=plots.MARKERS[index],
                color=plots.PALETTE[index], linestyle="none", markersize=4 if one_batch else 8,
                fillstyle="full" if one_batch else "none",
                label=f"{precision}, {'one batch' if one_batch else 'one by one'}",
            )  # fmt: skip
    ax.set_xscale("log")
    lost = rounding[(rounding.matrix == "Gauss-Newton") & (rounding.status != "done")]
    for (model, status), own_lost in lost.groupby(["model", "status"], sort=False):
        words = f"{', '.join(dict.fromkeys(own_lost.precision))}: {status}"
        place = (0.45, models.index(str(model)))
        ax.annotate(words, place, xycoords=ax.get_yaxis_transform(), ha="center", va="center", fontsize=7)
    plots.readable_log(ax.xaxis)
    ax.set_title("error of Gauss-Newton products\nagainst float64", fontsize=9)
    ax.legend(
        fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1), columnspacing=0.8
    )
