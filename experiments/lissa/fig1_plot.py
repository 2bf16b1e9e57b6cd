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
    """Draw rows of images, below each its scatter plot, and below that the exact solutions where there are any."""
    rows = [
        (task, positions, kind)
        for task, positions in blocks
        for kind in ("image", "stochastic", "exact")
        if kind != "exact" or table[table.task == task].exact.notna().any()
    ]
    heights = {"image": 0.55, "stochastic": 1.0, "exact": 1.0}
    figure, axes = plots.figure(
        len(rows), NUM_SHOWN, panel_size=(2.6, 2.0), height_ratios=[heights[kind] for _, _, kind in rows]
    )
    for ax in axes.flat:
        ax.set_axis_off()
    for row, (task, positions, kind) in enumerate(rows):
        of_task = table[table.task == task]
        points = list(dict.fromkeys(of_task.point))
        for column, position in enumerate(p for p in positions if p < len(points)):
            ax, panel = axes[row, column], of_task[of_task.point == points[position]]
            own = panels[(panels.task == task) & (panels.position == position)]
            if kind == "image":
                name = task if column == 0 else ""
                plots.show_image(ax, images[task][position], title=f"{name}\ntraining image {points[position]}")
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
