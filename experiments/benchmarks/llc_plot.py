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
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 2.8))
    left, right = axes[0]
    colors = {name: plots.PALETTE[index] for index, name in enumerate(timings.method)}
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
    right.barh(timings.method, timings.seconds, color=[colors[name] for name in timings.method])
    right.errorbar(
        timings.seconds,
        range(len(timings)),
        xerr=[timings.seconds - timings.fastest, timings.slowest - timings.seconds],
        fmt="none",
        color="black",
        capsize=3,
        linewidth=1,
    )
    for row, (_, own) in enumerate(timings.iterrows()):
        label, place = f"{own.seconds:.2g} s", (float(own.slowest), row)
        right.annotate(label, place, (4, 0), textcoords="offset points", va="center")
    right.invert_yaxis()
    right.margins(x=0.18)
    right.set_xlabel("seconds\n(median; line: fastest to slowest repeat)")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Redraw the figure of a result folder from its tables.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    figure = draw(pd.read_csv(folder / "summary.csv"), pd.read_csv(folder / "timings.csv"))
    figure.savefig(folder / "figure.png", dpi=110, metadata={"Software": None})
