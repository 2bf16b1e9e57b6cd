"""Table 3, plot: the two inequalities, sketches against Lanczos, variances of sketched dot products."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.lissa.tab3.claims import ENOUGH_ROWS

COLORS = {"dense": plots.PALETTE[0], "per tensor": plots.PALETTE[1]}
SHIFT = 0.16


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure."""
    table, paper = computed["table"], computed["paper"]
    height = 0.32 * (len(table) + len(paper)) + 1.6
    figure, axes = plots.figure(1, 3, panel_size=(3.5, height))
    _inequalities(axes[0, 0], table, paper)
    _sketches(axes[0, 1], table, computed["sketches"])
    _variances(axes[0, 2], table, computed["gradients"])
    for ax in axes[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), frameon=False, fontsize=8)
    return {"figure.png": figure}


def _inequalities(ax: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    names = [*table.task, *(f"{row} (paper)" for row in paper["row"])]
    places = np.arange(len(names))[::-1]
    columns = {"norm_over_trace": "‖G‖_F / tr", "square_over_product": "‖G‖_F² / (λmax tr)"}
    for index, (column, label) in enumerate(columns.items()):
        values = [*table[column], *paper[column]]
        ax.scatter(values, places, color=plots.PALETTE[index], marker=plots.MARKERS[index], s=30, label=label)
    ax.axvspan(1, 1000, color="#D55E00", alpha=0.12, linewidth=0, label="impossible for G ⪰ 0")
    ax.set_xscale("log")
    ax.set_xlim(right=1000)
    ax.set_yticks(places, names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.set_xlabel("ratio to its bound")


def _sketches(ax: Axes, table: pd.DataFrame, sketches: pd.DataFrame) -> None:
    places = np.arange(len(table))[::-1]
    for form, sign in (("dense", 1), ("per tensor", -1)):
        prefix = form.replace(" ", "_")
        value = table[f"{prefix}_value"] / table.lambda_max
        half = 1.96 * table[f"{prefix}_stderr"] / table.lambda_max
        for enough, face in ((True, COLORS[form]), (False, "white")):
            shown = ((table[f"{prefix}_rows"] >= ENOUGH_ROWS) == enough).to_numpy()
            if not shown.any():
                continue
            ax.errorbar(
                value[shown],
                places[shown] + sign * SHIFT,
                xerr=[np.minimum(half, value)[shown], half[shown]],  # an eigenvalue is not below 0
                color=COLORS[form],
                markerfacecolor=face,
                marker=plots.MARKERS[0 if form == "dense" else 1],
                markersize=5,
                linestyle="none",
                label=f"{form}, 95 %" + ("" if enough else f", below {ENOUGH_ROWS} rows"),
            )
        own = sketches[sketches.form == form]
        at = own.task.map(dict(zip(table.task, places, strict=True))) + 2 * sign * SHIFT
        if len(own):
            rows = "/".join(str(count) for count in own.rows.unique())
            ax.scatter(
                own.value / own.lambda_max,
                at,
                color=COLORS[form],
                s=8,
                alpha=0.6,
                label=f"{form}, {rows} rows each",
            )
    ax.axvline(1, color="#555555", linestyle="--", linewidth=1, label="Lanczos")
    counts = [
        f"{row['task']}\nrows: {row['dense_rows']} dense,\n{row['per_tensor_rows']} per tensor"
        for row in table.to_dict("records")
    ]
    ax.set_yticks(places, counts)
    ax.set_ylim(-0.6, len(table) - 0.4)
    ax.set_xlabel("λmax by a sketch / by Lanczos")


def _variances(ax: Axes, table: pd.DataFrame, gradients: pd.DataFrame) -> None:
    places = np.arange(len(table))[::-1]
    for place, row in zip(places, table.to_dict("records"), strict=True):
        own = gradients[gradients.task == row["task"]]
        ax.scatter(
            own.per_tensor / own.dense,
            place + np.linspace(-0.2, 0.2, len(own)),
            color=plots.PALETTE[0],
            s=10,
            alpha=0.6,
            label="pairs of gradients" if place == places[0] else "_nolegend_",
        )
        exact = (own.per_tensor_exact / own.dense_exact).median()
        marks = ((exact, "-", "exact, median"), (1 / row["tensors"], ":", "1/L, equal norms"))
        for value, style, label in marks:
            ax.plot(
                [value, value],
                [place - 0.35, place + 0.35],
                color="black",
                linestyle=style,
                linewidth=1.2,
                label=label if place == places[0] else "_nolegend_",
            )
    ax.axvline(1, color="#555555", linestyle="--", linewidth=1, label="no gain")
    ax.set_xscale("log")
    ax.set_yticks(places, [f"{row['task']}\nL = {row['tensors']}" for row in table.to_dict("records")])
    ax.set_ylim(-0.6, len(table) - 0.4)
    ax.set_xlabel("variance,\nper tensor / dense")
