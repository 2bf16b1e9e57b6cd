"""Time of a step beside Adam's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.benchmarks.ngd_step.parts import PARTS

MOST_STEPS = 3.0  # what NGD's step on ResNet-18 may cost, in steps of Adam


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the bars by model, NGD and its floor against the rank where there are several, and a step's parts."""
    ranks = computed["ranks"]
    figures = {"ranks.png": _draw_ranks(ranks)} if len(ranks) else {}
    if len(parts := computed["parts"]):
        figures["parts.png"] = _draw_parts(parts)
    return figures | {"figure.png": _draw_models(computed["summary"])}


def _draw_ranks(ranks: pd.DataFrame) -> Figure:
    """Return time over rank, in steps of Adam, with 95 % intervals."""
    figure, axes = plots.figure(1, 1, panel_size=(4.6, 3.2))
    ax = axes[0, 0]
    for index, name in enumerate(("ngd", "floor", "products")):
        own = ranks[ranks.optimizer == name]
        errors = np.clip([own.to_adam - own.to_adam_low, own.to_adam_high - own.to_adam], 0, None)
        style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
        ax.errorbar(own["rank"], own.to_adam, yerr=errors, capsize=3, label=name, **style)
    ax.axhline(MOST_STEPS, color="#555555", linestyle="--", linewidth=1, label=f"{MOST_STEPS:g} × Adam")
    ax.set_ylim(bottom=0)
    products = ranks[ranks.optimizer == "products"].sort_values("rank").iloc[-1]
    ax.set_xlabel("largest rank of an axis")
    ax.set_ylabel("time of a step / Adam's")
    alone = f"products alone at rank {products['rank']}: {products.to_adam:.2g} × Adam"
    ax.set_title(f"{ranks.model.iloc[0]}\n{alone}")
    ax.legend(fontsize=8, frameon=False)
    return figure


def _draw_parts(table: pd.DataFrame) -> Figure:
    """Return a bar for each model, of its step's parts; NGD as a user gets it, and the least, are marks on it."""
    models = table.model.unique().tolist()
    figure, axes = plots.figure(1, 1, panel_size=(6.4, 1.4 + 0.6 * len(models)))
    ax, left = axes[0, 0], np.zeros(len(models))
    by_part = {part: own.set_index("model").to_adam[models].to_numpy() for part, own in table.groupby("part")}
    for index, part in enumerate(PARTS):
        ax.barh(models, by_part[part], left=left, height=0.5, color=plots.PALETTE[index], label=part)
        left += by_part[part]
    for name, marker in (("least", "|"), ("ngd", "x")):
        ax.plot(by_part[name], models, linestyle="none", marker=marker, markersize=14, color="black", label=name)
    ax.axvline(MOST_STEPS, color="#555555", linestyle="--", linewidth=1, label=f"{MOST_STEPS:g} × Adam")
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("CPU time of a step on one thread / Adam's")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _draw_models(summary: pd.DataFrame) -> Figure:
    """Return one panel for each model: a bar for each optimizer in steps of Adam, its milliseconds above it."""
    models = summary.model.unique().tolist()
    figure, axes = plots.figure(1, len(models), panel_size=(2.9, 3.4))
    for ax, model in zip(axes[0], models, strict=True):
        own = summary[summary.model == model]
        places = np.arange(len(own))
        errors = np.clip([own.to_adam - own.to_adam_low, own.to_adam_high - own.to_adam], 0, None)
        ax.bar(places, own.to_adam, yerr=errors, color=plots.PALETTE[: len(own)], capsize=3, width=0.7)
        top = max(float(own.to_adam_high.max()), MOST_STEPS)
        for place, (_, row) in zip(places, own.iterrows(), strict=True):
            height = max(row.to_adam_high, row.to_adam) + 0.02 * top
            if MOST_STEPS - 0.06 * top < height < MOST_STEPS:  # the line would strike it through
                height = MOST_STEPS + 0.02 * top
            ax.text(place, height, f"{row.milliseconds:.3g} ms", ha="center", fontsize=7)
        ax.axhline(MOST_STEPS, color="#555555", linestyle="--", linewidth=1)
        ax.text(-0.45, MOST_STEPS, "3 × Adam", va="bottom", fontsize=8, color="#555555")
        ax.set_ylim(0, 1.15 * top)
        ax.set_xticks(places, own.optimizer, rotation=30)
        ax.grid(visible=False, axis="x")
        ax.set_title(f"{model}\n{own.parameters.iloc[0]:,} parameters")
    axes[0, 0].set_ylabel("time of a step / Adam's (mean, 95 % interval)")
    return figure
