"""Time of products in units of what cannot be saved."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one panel for each number of vectors: bars by model and method, the aim as a line."""
    table = computed["table"]
    rows = table[~table.method.isin(["forward", "gradient"])]
    counts = rows.num_vectors.unique().tolist()
    models = rows.model.unique().tolist()
    figure, axes = plots.figure(1, len(counts), panel_size=(4.2, 3.2))
    for ax, count in zip(axes[0], counts, strict=True):
        own = rows[rows.num_vectors == count]
        methods = own.method.unique().tolist()
        width = 0.8 / len(methods)
        for index, method in enumerate(methods):
            values = own[own.method == method].set_index("model").to_base.reindex(models)
            places = np.arange(len(models)) + (index - (len(methods) - 1) / 2) * width
            ax.bar(places, values, width=0.92 * width, color=plots.PALETTE[index], label=method)
        for place, model in enumerate(models):
            aim = float(own[own.model == model].aim.iloc[0])
            label = "aim" if place == 0 else None
            ax.hlines(aim, place - 0.45, place + 0.45, color="black", linewidth=1.2, label=label)
        bases = own.groupby("model", sort=False).base.first()
        labels = [f"{model}\n({bases[model]})".replace(" + ", "\n+ ") for model in models]
        ax.set_xticks(range(len(models)), labels, fontsize=7)
        ax.set_title(f"{count} vector{'s' if count > 1 else ''}")
        ax.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("time for each vector,\nin units of (...)")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return {"figure.png": figure}
