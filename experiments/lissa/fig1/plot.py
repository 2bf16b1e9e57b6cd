"""Fig. 1, plot: training images with their scatter plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from curvlab.reporting import plots
from experiments.target import Computed

NUM_SHOWN = 5  # training images of a task in Fig. 1; the figures after it show all


@dataclass(frozen=True)
class _Task:
    """What is shown of one task: scores by point, its panels, (K, H, W) or (K, H, W, 3) images."""

    label: str
    scores: list[pd.DataFrame]
    panels: pd.DataFrame
    images: list[np.ndarray]

    @classmethod
    def of(cls, computed: Computed, label: str) -> _Task:
        scores = [own for _, own in computed[f"scores_{label}"].groupby("point", sort=False)]
        panels = computed["table"]
        strip = np.asarray(Image.open(computed.folder / f"images_{label}.png")) / 255
        return cls(label, scores, panels[panels.task == label], np.split(strip, len(scores), axis=1))


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: Fig. 1 (five points of each task) and one with all points of each task."""
    tasks = [_Task.of(computed, label) for label in computed["table"].task.unique()]
    figures = {"figure.png": _grid([(task, range(NUM_SHOWN)) for task in tasks])}
    for task in tasks:
        starts = range(0, len(task.scores), NUM_SHOWN)
        figures[f"figure_{task.label}.png"] = _grid([(task, range(start, start + NUM_SHOWN)) for start in starts])
    return figures


def _grid(blocks: Sequence[tuple[_Task, range]]) -> Figure:
    """Draw rows of images, below each its scatter plot, and below that the exact solutions where there are any."""
    rows = [
        (task, positions, kind)
        for task, positions in blocks
        for kind in ("image", "stochastic", "exact")
        if kind != "exact" or any(panel.exact.notna().any() for panel in task.scores)
    ]
    heights = {"image": 0.55, "stochastic": 1.0, "exact": 1.0}
    figure, axes = plots.figure(
        len(rows), NUM_SHOWN, panel_size=(2.6, 2.0), height_ratios=[heights[kind] for _, _, kind in rows]
    )
    for ax in axes.flat:
        ax.set_axis_off()
    for row, (task, positions, kind) in zip(axes, rows, strict=True):
        for column, position in enumerate(p for p in positions if p < len(task.scores)):
            ax, panel = row[column], task.scores[position]
            own = task.panels[task.panels.position == position]
            if kind == "image":
                name = task.label if column == 0 else ""
                title = f"{name}\ntraining image {panel.point.iloc[0]}"
                plots.show_image(ax, task.images[position], title=title)
            elif kind == "stochastic":
                _stochastic(ax, panel, own)
                if column == 0:
                    ax.set_ylabel("PBRF by SGD")
            elif panel.exact.notna().any():
                _exact(ax, panel, own)
                if column == 0:
                    ax.set_ylabel("exact PBRF")
    handles = {
        label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    title = "change of a test loss per unit weight of the training image (nats); r, slope: mean ± s.e. over seeds"
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, title=title, markerscale=2
    )
    return figure


def _stochastic(ax: Axes, panel: pd.DataFrame, own: pd.DataFrame) -> None:
    ax.set_axis_on()
    ax.set_xlabel("LiSSA")
    color = plots.PALETTE[0]
    ax.scatter(
        panel.lissa_0, panel.pbrf_0, s=5, color=color, label="500 test losses: LiSSA, PBRF by SGD (one seed)"
    )
    _widen(ax, panel)
    plots.identity_line(ax)
    case = own.lissa_pbrf_case.iloc[0]
    if case == "overflow":
        plots.annotate(ax, "LiSSA or SGD overflows")
        return
    pearson, slope = own.lissa_pbrf_pearson.dropna(), own.lissa_pbrf_slope.dropna()
    plots.annotate(ax, f"r = {_with_error(pearson)}\nslope {_with_error(slope)}\n{case}")


def _exact(ax: Axes, panel: pd.DataFrame, own: pd.DataFrame) -> None:
    ax.set_axis_on()
    ax.set_xlabel("influence")
    ax.scatter(
        panel.cg, panel.exact, s=9, marker="x", linewidths=0.7, color=plots.PALETTE[1], label="CG, exact PBRF"
    )
    lines = [f"CG: r = {own.cg_exact_pearson.mean():.3f}"]
    if panel.lissa_auto.notna().any():
        ax.scatter(
            panel.lissa_auto,
            panel.exact,
            s=7,
            marker="^",
            linewidths=0,
            color=plots.PALETTE[2],
            label="LiSSA with C measured, exact PBRF",
        )
        lines.append(f"LiSSA, C measured: r = {panel.lissa_auto.corr(panel.exact):.3f}")
    plots.identity_line(ax)
    plots.annotate(ax, "\n".join(lines))


def _widen(ax: Axes, panel: pd.DataFrame) -> None:
    """Make axes logarithmic beyond the range of the exact scores where stochastic ones leave it far behind."""
    exact = panel[["cg", "exact"]].abs().to_numpy().max()
    stochastic = panel[["lissa_0", "pbrf_0"]].to_numpy()
    largest = np.abs(stochastic[np.isfinite(stochastic)]).max(initial=0.0)
    if largest > 10 * exact > 0:
        ax.set_xscale("symlog", linthresh=exact)
        ax.set_yscale("symlog", linthresh=exact)
        ax.set_xlim(-1.5 * largest, 1.5 * largest)
        ax.set_ylim(-1.5 * largest, 1.5 * largest)
        ticks = [-(10.0 ** np.floor(np.log10(largest))), 0.0, 10.0 ** np.floor(np.log10(largest))]
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
        ax.minorticks_off()


def _with_error(values: pd.Series) -> str:
    mean = float(values.mean())
    if len(values) < 2:
        return f"{mean:.2f}" if abs(mean) < 100 else f"{mean:.0e}"
    error = float(values.std()) / len(values) ** 0.5
    return f"{mean:.2f} ± {error:.2f}" if max(abs(mean), error) < 100 else f"{mean:.0e} ± {error:.0e}"
