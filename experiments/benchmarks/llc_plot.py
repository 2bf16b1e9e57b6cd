"""Estimates and seconds of bench-llc, drawn from summary.csv and timings.csv alone.

python -m experiments.benchmarks.llc_plot results/benchmarks/llc/laptop
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from curvlab.reporting import plots


def draw(summary: pd.DataFrame, timings: pd.DataFrame) -> Figure:
    """Return estimates with their intervals on the left, seconds on the right."""
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 3.2))
    left, right = axes[0]
    colors = {name: plots.PALETTE[index] for index, name in enumerate(timings.method.unique())}
    for row, (_, own) in enumerate(summary.iterrows()):
        left.errorbar(
            float(own.llc),
            row,
            xerr=[[float(own.llc - own.low)], [float(own.high - own.llc)]],
            fmt=plots.MARKERS[0],
            color=colors[own.method],
            capsize=4,
        )
    left.set_yticks(range(len(summary)), summary.method)
    left.invert_yaxis()
    left.margins(y=0.2)
    left.set_xlabel("estimated learning coefficient\n(95 % t interval over chains)")
    left.set_title(str(summary.model.iloc[0]))
    methods, threads = list(colors), sorted(timings.threads.unique())
    height = 0.8 / len(threads)
    for shift, count in enumerate(threads):
        own = timings[timings.threads == count]
        places = [methods.index(name) + (shift - (len(threads) - 1) / 2) * height for name in own.method]
        shades = [colors[name] for name in own.method]
        right.barh(places, own.cpu_seconds, height=height, color=shades, alpha=1.0 if shift == 0 else 0.55)
        for place, seconds in zip(places, own.cpu_seconds, strict=True):
            label = f"{seconds:.3g} s, {count} thread{'s' if count > 1 else ''}"
            right.annotate(label, (seconds, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    right.set_yticks(range(len(methods)), methods)
    right.invert_yaxis()
    right.margins(x=0.6)
    right.set_xlabel("CPU seconds of all cores\n(median; on the clock: timings.csv)")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Redraw the figure of a result folder from its tables.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    figure = draw(pd.read_csv(folder / "summary.csv"), pd.read_csv(folder / "timings.csv"))
    figure.savefig(folder / "figure.png", dpi=110, metadata={"Software": None})
