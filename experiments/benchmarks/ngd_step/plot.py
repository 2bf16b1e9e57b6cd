"""Time of a step beside Adam's."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.target import Computed

MOST_STEPS = 3.0  # what NGD's step on ResNet-18 may cost, in steps of Adam


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one panel for each model: a bar for each optimizer in steps of Adam, its milliseconds above it."""
    summary = computed["summary"]
    models = summary.model.unique().tolist()
    figure, axes = plots.figure(1, len(models), panel_size=(2.9, 3.4))
    for ax, model in zip(axes[0], models, strict=True):
        own = summary[summary.model == model]
        places = np.arange(len(own))
        errors = np.clip([own.to_adam - own.to_adam_low, own.to_adam_high - own.to_adam], 0, None)
        ax.bar(places, own.to_adam, yerr=errors, color=plots.PALETTE[: len(own)], capsize=3, width=0.7)
        top = max(float(own.to_adam_high.max()), MOST_STEPS)
        for place, (_, row) in zip(places, own.iterrows(), strict=True):
            ax.text(
                place,
                max(row.to_adam_high, row.to_adam) + 0.02 * top,
                f"{row.milliseconds:.3g} ms",
                ha="center",
                fontsize=8,
            )
        ax.axhline(MOST_STEPS, color="#555555", linestyle="--", linewidth=1)
        ax.text(-0.45, MOST_STEPS, "3 × Adam", va="bottom", fontsize=8, color="#555555")
        ax.set_ylim(0, 1.15 * top)
        ax.set_xticks(places, own.optimizer, rotation=30)
        ax.grid(visible=False, axis="x")
        ax.set_title(f"{model}\n{own.parameters.iloc[0]:,} parameters")
    axes[0, 0].set_ylabel("time of a step / Adam's (mean, 95 % interval)")
    return {"figure.png": figure}
