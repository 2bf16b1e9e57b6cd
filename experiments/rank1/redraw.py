"""Draw a target's figures again from the tables of its result folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

Draw = Callable[..., dict[str, Figure]]


def redraw(draw: Draw, *tables: str) -> None:
    """Command line: python -m experiments.rank1.<item>_plot results/rank1/<item>/<preset>.

    Args:
        draw: returns figures by file name from the tables, in order.
        tables: file names; table.csv by default.
    """
    parser = argparse.ArgumentParser(description="Redraw the figures of a result folder from its tables.")
    parser.add_argument("folder", type=Path, help="for example results/rank1/fig1/embedded")
    folder = parser.parse_args().folder
    frames = [pd.read_csv(folder / name) for name in tables or ("table.csv",)]
    for name, figure in draw(*frames).items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        print(folder / name)
