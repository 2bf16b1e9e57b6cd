"""Three panels: memory, time, rounding."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.target import Computed

AIM = 1.2
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
    ax.barh(places, table.memory_ratio, 0.6, color=plots.PALETTE[0], label="product / gradient step")
    for column, marker, label in (
        ("low_memory_ratio", plots.MARKERS[1], "product with low_memory / gradient step"),
        ("plain_ratio", plots.MARKERS[0], "gradient step by plain attention"),
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
    ax.barh(places, table.time_to_floor, 0.6, color=plots.PALETTE[2], label="median over rounds")
    ax.axvline(1.0, color="black", linewidth=1, label="floor")
    ax.set_title("time of a product /\n(two forwards + a gradient)", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _draw_rounding(ax: Axes, rounding: pd.DataFrame, models: list[str]) -> None:
    own = rounding[(rounding.matrix == "Gauss-Newton") & (rounding.status == "done")]
    for index, precision in enumerate(PRECISIONS):
        for one_batch in (True, False):
            some = own[(own.precision == precision) & ((own.batches == 1) == one_batch)]
            ax.plot(
                some.error, [models.index(model) for model in some.model], marker=plots.MARKERS[index],
                color=plots.PALETTE[index], linestyle="none", markersize=5,
                fillstyle="full" if one_batch else "none",
                label=f"{precision}, {'one batch' if one_batch else 'one by one'}",
            )  # fmt: skip
    ax.set_xscale("log")
    plots.readable_log(ax.xaxis)
    ax.set_title("error of Gauss-Newton products\nagainst float64", fontsize=9)
    ax.legend(
        fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1), columnspacing=0.8
    )
