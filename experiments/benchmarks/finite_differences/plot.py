"""Error against step."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

EPSILON = {"fp32": torch.finfo(torch.float32).eps, "fp64": torch.finfo(torch.float64).eps}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one panel for each task: geometric mean of the error with its interval, for both precisions."""
    summary = computed["summary"]
    tasks = summary.task.unique().tolist()
    figure, axes = plots.figure(1, len(tasks), panel_size=(4.0, 3.6), sharey=True)
    for ax, task in zip(axes[0], tasks, strict=True):
        _draw_task(ax, summary[summary.task == task])
        ax.set_title(task)
        ax.set_xlabel("step ‖δv‖")
    axes[0, 0].set_ylabel("relative error of $G v$")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return {"figure.png": figure}


def _draw_task(ax: Axes, own: pd.DataFrame) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    for index, (precision, curve) in enumerate(own.groupby("precision", sort=False)):
        color, marker = plots.PALETTE[index], plots.MARKERS[index]
        name = str(precision)
        finite, forward = curve[curve.step > 0], curve[curve.step == 0]
        ax.plot(finite.step, finite.relative_error, color=color, marker=marker, markersize=3.5, label=name)
        ax.fill_between(finite.step, finite.low, finite.high, color=color, alpha=0.2, linewidth=0)
        default = finite[finite.default]
        ax.scatter(
            default.step,
            default.relative_error,
            s=110,
            facecolors="none",
            edgecolors=color,
            linewidths=1.8,
            zorder=3,
            label=f"default step, {name}",
        )
        smooth = EPSILON[name] ** (1 / 3) * float(curve.parameter_norm.iloc[0])
        ax.axvline(smooth, color=color, linestyle=":", linewidth=1, label=f"eps$^{{1/3}}$‖θ‖, {name}")
        if len(forward):
            ax.axhline(
                float(forward.relative_error.iloc[0]),
                color=color,
                linestyle="--",
                linewidth=1,
                label=f"forward mode, {name}",
            )
