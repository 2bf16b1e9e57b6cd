"""1-D function: |x_k| and |f'| by steps."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: |x_k| from the farthest start, then |f'| from the nearest and the farthest."""
    table = computed["table"]
    near, far = table.start.min(), table.start.max()
    figure, axes = plots.figure(1, 3, panel_size=(3.4, 3.0))
    panels = [("x", far, "|x_k|", (1e-6, 1e6)), ("gradient_norm", near, "|f'(x_k)|", (1e-15, 10))]
    panels.append(("gradient_norm", far, "|f'(x_k)|", (1e-15, 10)))
    for ax, (column, start, label, limits) in zip(axes[0], panels, strict=True):
        _curves(ax, table[table.start == start], column)
        ax.set_title(f"{label} from x = {start:g}")
        ax.set_ylim(*limits)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    return {"figure.png": figure}


def _curves(ax: Axes, table: pd.DataFrame, column: str) -> None:
    for index, (method, own) in enumerate(table.groupby("method", sort=False)):
        named = own.delta.isna().all()
        ax.plot(
            own.step,
            own[column].abs().clip(lower=1e-16),
            marker=plots.MARKERS[index],
            markersize=3,
            linewidth=1,
            linestyle="--" if named else "-",
            color=plots.PALETTE[index],
            label=str(method),
        )
    ax.set_yscale("log")
    ax.set_xlim(-1, 40)
    ax.set_xlabel("step k")
