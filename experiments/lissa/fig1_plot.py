"""Fig. 1, plot: drawn from the saved tables alone.

python -m experiments.lissa.fig1_plot results/lissa/fig1/embedded
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from curvlab.reporting import plots
from experiments.lissa.fig1_tables import panel_table

NUM_SHOWN = 5  # training images a task in Fig. 1; the figures after it show all


def draw(table: pd.DataFrame, images: dict[str, np.ndarray]) -> dict[str, Figure]:
    """Return the figures by file name: Fig. 1 (five points a task) and one with all points of each task.

    Args:
        table: as `score_table` gives it.
        images: (K, H, W) or (K, H, W, 3) in [0, 1] for each task: the training points in the table's order.
    """
    panels = panel_table(table)
    tasks: list[str] = table.task.unique().tolist()
    figures = {"figure.png": _grid(table, panels, images, [(task, range(NUM_SHOWN)) for task in tasks])}
    for task in tasks:
        num_points = table[table.task == task].point.nunique()
        blocks = [
            (task, range(start, min(start + NUM_SHOWN, num_points))) for start in range(0, num_points, NUM_SHOWN)
        ]
        figures[f"figure_{task}.png"] = _grid(table, panels, images, blocks)
    return figures


def _grid(
    table: pd.DataFrame,
    panels: pd.DataFrame,
    images: dict[str, np.ndarray],
    blocks: Sequence[tuple[str, range]],
) -> Figure:
    """Draw rows of images, and below each its scatter plot."""
    figure, axes = plots.figure(
        2 * len(blocks), NUM_SHOWN, panel_size=(2.6, 1.9), height_ratios=[0.55, 1.0] * len(blocks)
    )
    for ax in axes.flat:
        ax.set_axis_off()
    for block, (task, positions) in enumerate(blocks):
        of_task = table[table.task == task]
        points = list(dict.fromkeys(of_task.point))
        for column, position in enumerate(p for p in positions if p < len(points)):
            point = points[position]
            image_ax, scatter_ax = axes[2 * block, column], axes[2 * block + 1, column]
            plots.show_image(image_ax, images[task][position], title=f"{task}\ntraining image {point}")
            own = panels[(panels.task == task) & (panels.position == position)]
            _scatter(scatter_ax, of_task[of_task.point == point], own)
            scatter_ax.set_xlabel("influence (nats / weight)")
            if column == 0:
                scatter_ax.set_ylabel("PBRF response (nats / weight)")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _scatter(ax: Axes, panel: pd.DataFrame, own: pd.DataFrame) -> None:
    ax.set_axis_on()
    ax.scatter(
        panel.lissa_0,
        panel.pbrf_0,
        s=5,
        color=plots.PALETTE[0],
        label="LiSSA, PBRF by SGD (first seed; r and slope: mean ± s.e. over seeds)",
    )
    if panel.exact.notna().any():
        ax.scatter(
            panel.cg, panel.exact, s=5, marker="x", linewidths=0.5, color=plots.PALETTE[1], label="CG, exact PBRF"
        )
        ax.scatter(
            panel.lissa_auto,
            panel.exact,
            s=5,
            marker="^",
            linewidths=0,
            color=plots.PALETTE[2],
            label="LiSSA with C measured, exact PBRF",
        )
        _widen(ax, panel)
    plots.identity_line(ax)
    case = own.lissa_pbrf_case.iloc[0]
    if case == "overflow":
        plots.annotate(ax, "LiSSA or SGD overflows")
        return
    pearson, slope = own.lissa_pbrf_pearson.dropna(), own.lissa_pbrf_slope.dropna()
    text = f"r = {_with_error(pearson)}\nslope {_with_error(slope)}\n{case}"
    plots.annotate(ax, text)


def _widen(ax: Axes, panel: pd.DataFrame) -> None:
    """Make axes logarithmic beyond the range of the exact scores, where diverged ones would hide them."""
    exact = panel[["cg", "exact"]].abs().to_numpy().max()
    all_scores = panel[["cg", "exact", "lissa_0", "pbrf_0"]].to_numpy()
    largest = np.abs(all_scores[np.isfinite(all_scores)]).max()
    if largest > 10 * exact > 0:
        ax.set_xscale("symlog", linthresh=exact)
        ax.set_yscale("symlog", linthresh=exact)
        ax.set_xlim(-1.5 * largest, 1.5 * largest)
        ax.set_ylim(-1.5 * largest, 1.5 * largest)
        ticks = [-(10.0 ** np.floor(np.log10(largest))), 0.0, 10.0 ** np.floor(np.log10(largest))]
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)


def _with_error(values: pd.Series) -> str:
    if len(values) < 2:
        return f"{float(values.mean()):.2f}"
    return f"{float(values.mean()):.2f} ± {float(values.std()) / len(values) ** 0.5:.2f}"


def save_images(path: Path, images: dict[str, np.ndarray]) -> None:
    """Write the training images as one strip a task, <path>/images_<task>.png."""
    for task, stack in images.items():
        strip = np.concatenate(list(np.round(255 * stack).astype(np.uint8)), axis=1)
        Image.fromarray(strip).save(path / f"images_{task}.png")


def load_images(path: Path, tasks: Sequence[str], table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Read what `save_images` wrote."""
    images = {}
    for task in tasks:
        strip = np.asarray(Image.open(path / f"images_{task}.png")) / 255
        images[task] = np.stack(np.split(strip, table[table.task == task].point.nunique(), axis=1))
    return images


def main() -> None:
    """Redraw the figures of a result folder."""
    parser = argparse.ArgumentParser(description="Redraw Fig. 1 from the table of a result folder.")
    parser.add_argument("folder", type=Path, help="for example results/lissa/fig1/embedded")
    folder = parser.parse_args().folder
    table = pd.read_csv(folder / "table.csv")
    for name, figure in draw(table, load_images(folder, list(table.task.unique()), table)).items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        print(folder / name)


if __name__ == "__main__":
    main()
