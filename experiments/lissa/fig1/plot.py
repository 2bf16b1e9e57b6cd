"""Fig. 1, plot: training images with their scatter plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from curvlab.lab import Computed, plots
from experiments.lissa.fig1.runs_interval import runs_error
from experiments.lissa.fig1.tables import CHOICES, coinciding

COLORS = dict(zip(CHOICES, (0, 2, 3), strict=True))
NUM_SHOWN = 5  # training images of a task in Fig. 1; the figures after it show all


@dataclass(frozen=True)
class _Task:
    """What is shown of one task: scores by point, its panels, (K, H, W) or (K, H, W, 3) images."""

    label: str
    scores: list[pd.DataFrame]
    panels: pd.DataFrame
    images: list[np.ndarray]
    coincide: bool  # C measured is below 1: its runs are those of C = 2

    @classmethod
    def of(cls, computed: Computed, label: str) -> _Task:
        scores = [own for _, own in computed[f"scores_{label}"].groupby("point", sort=False)]
        panels = computed["table"]
        strip = np.asarray(Image.open(computed.folder / f"images_{label}.png")) / 255
        images = np.split(strip, len(scores), axis=1)
        same = label in coinciding(computed["summary"])
        return cls(label, scores, panels[panels.task == label], images, same)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: Fig. 1 (five points of each task) and one with all points of each task."""
    tasks = [_Task.of(computed, label) for label in computed["table"].task.unique()]
    figures = {"figure.png": _grid([(task, range(NUM_SHOWN)) for task in tasks])}
    for task in tasks:
        starts = range(0, len(task.scores), NUM_SHOWN)
        figures[f"figure_{task.label}.png"] = _grid([(task, range(start, start + NUM_SHOWN)) for start in starts])
    return figures


def _grid(blocks: Sequence[tuple[_Task, range]]) -> Figure:
    """Draw rows of images, below each its scatter plots: choices of batches and exact solutions, if there."""
    rows = [
        (task, positions, kind)
        for task, positions in blocks
        for kind in ("image", *CHOICES, "exact")
        if kind == "image"
        or any(_has(task.scores[place], kind) for place in positions if place < len(task.scores))
    ]
    figure, axes = plots.figure(
        len(rows),
        NUM_SHOWN,
        panel_size=(2.6, 2.0),
        height_ratios=[0.55 if kind == "image" else 1.0 for _, _, kind in rows],
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
            elif not _has(panel, kind):
                plots.show_missing(ax, _why_missing(task, kind))
            else:
                ax.set_axis_on()
                if kind == "exact":
                    _exact(ax, panel, own)
                else:
                    _stochastic(ax, panel, own[own.constant == CHOICES[kind]], kind)
                if column == 0:
                    ax.set_ylabel(
                        "exact PBRF" if kind == "exact" else "PBRF by SGD\n" + CHOICES[kind].replace(", ", ",\n")
                    )
                    if kind == "measured_" and task.coincide:
                        ax.set_ylabel("PBRF by SGD\nC measured, below 1:\nthe runs of C = 2")
    handles = {
        label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    title = "change of a test loss per unit weight of the training image (nats); r, slope: mean ± s.e. over seeds"
    if any(ax.get_xscale() == "symlog" for ax in axes.flat):
        title += "\naxes that end in powers of ten: linear around 0, logarithmic beyond"
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, title=title, markerscale=2
    )
    return figure


def _has(panel: pd.DataFrame, kind: str) -> bool:
    """Return whether a point has this row: both stochastic scores with this prefix, or both exact ones."""
    if kind == "exact":
        return bool(panel.exact.notna().any())
    return f"{kind}lissa_0" in panel and not panel[f"{kind}lissa_0"].isna().all()


def _why_missing(task: _Task, kind: str) -> str:
    """Return why a point has no panel in a row that others have: it is computed for the first points alone."""
    what = "solved exactly" if kind == "exact" else f"run with {CHOICES[kind]}"
    count = sum(_has(own, kind) for own in task.scores)
    return f"not {what}:\nat this preset the first\n{count} of {len(task.scores)} points only"


def _stochastic(ax: Axes, panel: pd.DataFrame, own: pd.DataFrame, prefix: str) -> None:
    """Draw LiSSA of seed 0 and SGD on the next seed's batches; on its own where every batch is all the data."""
    ax.set_xlabel("LiSSA")
    x = panel[f"{prefix}lissa_0"]
    y = panel.get(f"{prefix}pbrf_1", panel[f"{prefix}pbrf_0"])
    color = plots.PALETTE[COLORS[prefix]]
    first = own.iloc[0]
    if first.lissa_pbrf_case == "overflow":
        found = {"LiSSA": not np.isfinite(x).all(), "SGD": not np.isfinite(y).all()}
        plots.annotate(ax, " and ".join(name for name, over in found.items() if over) + " overflow")
        ax.set_xticks([])
        ax.set_yticks([])
        return
    label = f"{CHOICES[prefix]}: {len(panel)} test losses, one seed of LiSSA, another of SGD"
    ax.scatter(x, y, s=5, color=color, label=label)
    _widen(ax, panel, x, y)
    plots.identity_line(ax)
    pearson, slope = own.lissa_pbrf_pearson.dropna(), own.lissa_pbrf_slope.dropna()
    cases = own.lissa_pbrf_case.value_counts()
    share = "" if len(own) == 1 or cases.iloc[0] == len(own) else f" {cases.iloc[0]} of {len(own)}"
    _above(ax, f"r = {_with_error(pearson)}, {cases.index[0]}{share}\nslope {_with_error(slope)}")


def _exact(ax: Axes, panel: pd.DataFrame, own: pd.DataFrame) -> None:
    ax.set_xlabel("influence by CG")
    ax.scatter(
        panel.cg, panel.exact, s=9, marker="x", linewidths=0.7, color=plots.PALETTE[1], label="CG, exact PBRF"
    )
    plots.identity_line(ax)
    _above(ax, f"r = {own.cg_exact_pearson.mean():.3f}")


def _above(ax: Axes, text: str) -> None:
    """Say it above the panel, where it covers no point."""
    ax.set_title(text, fontsize=7, loc="left")


def _widen(ax: Axes, panel: pd.DataFrame, x: pd.Series, y: pd.Series) -> None:
    """Make axes logarithmic beyond the range of the exact scores where stochastic ones leave it far behind.

    Where nothing is solved exactly, beyond their median, if the largest would squeeze all others.
    """
    exact = panel[["cg", "exact"]].abs().max().max()  # nan where nothing is solved exactly
    usual, far = (exact, 10) if np.isfinite(exact) else (np.median(np.abs([x, y])), 1000)
    largest = max(x.abs().max(), y.abs().max())
    if largest > far * usual > 0:
        ax.set_xscale("symlog", linthresh=usual)
        ax.set_yscale("symlog", linthresh=usual)
        edge = 1.5 * largest * (largest / usual) ** 0.05  # a point at the edge would be cut in half
        ax.set_xlim(-edge, edge)
        ax.set_ylim(-edge, edge)
        ticks = [-(10.0 ** np.floor(np.log10(largest))), 0.0, 10.0 ** np.floor(np.log10(largest))]
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
        ax.minorticks_off()


def _with_error(values: pd.Series) -> str:
    """Return mean ± s.e. of panels, one for each seed, each of which has the batches of two runs."""
    mean, count = float(values.mean()), len(values)
    # Three panels or more: leave out a run, which is in its own panel and in the one before.
    without = (
        [float(values.drop(values.index[[run, run - 1]]).mean()) for run in range(count)] if count > 2 else []
    )
    if not without:
        return f"{mean:.2f}" if abs(mean) < 100 else f"{mean:.0e}"
    error = runs_error(without)
    return f"{mean:.2f} ± {error:.2f}" if max(abs(mean), error) < 100 else f"{mean:.0e} ± {error:.0e}"
