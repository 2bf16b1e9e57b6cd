"""A stranger's scores on a bank: a row beside the board's, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.influence.bank import AGAINST, lds, load_bank
from curvlab.lab import panels, plots, tables
from experiments.benchmarks.board.banks import PRESETS

YOURS, OUTPUT = "yours", Path("outputs/score")
COLUMNS = ["method", "against", "lds", "lds_low", "lds_high"]


def judge_file(name: str, path: str) -> None:
    """Print the rows of the board with that of a file's scores among them, and draw them."""
    bank = load_bank(name)
    try:
        scores = np.load(path, allow_pickle=False)
        found = [lds(scores, bank, against=against) for against in AGAINST]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}")
    yours = [
        {"method": YOURS, "against": f.against, "lds": f.value, "lds_low": f.low, "lds_high": f.high}
        for f in found
    ]
    board = pd.concat([pd.DataFrame(yours), board_of(bank.recipe["task"])[COLUMNS]], ignore_index=True)
    print(
        f"bank {name}: {len(bank.subsets)} subsets, {len(found[0].per_network)} of {len(bank.single_run)} networks"
    )
    print(text(board))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    plots.write_png(draw(board, name), OUTPUT / f"{name}.png")
    print(f"{OUTPUT / name}.png")


def board_of(task: str, results: str | Path = "results") -> pd.DataFrame:
    """Return the published rows of a task, each method at its best damping; none where it is not published."""
    for preset in PRESETS:
        folder = Path(results) / "benchmarks" / "board" / preset
        if (folder / "best.csv").is_file():
            best = tables.read_table(folder, "best")
            if len(own := best[best.task == task]):
                return own
    return pd.DataFrame(columns=COLUMNS)


def text(board: pd.DataFrame) -> str:
    """Return a line for each method, the best by the standard protocol first."""
    order = board[board.against == AGAINST[-1]].sort_values("lds", ascending=False).method
    width = max(map(len, order))
    lines = [f"{'':{width}}  " + "  ".join(f"{against:<22}" for against in AGAINST)]
    cells = {
        (row.method, row.against): f"{row.lds:.3f} ({row.lds_low:.3f} to {row.lds_high:.3f})"
        for row in board.itertuples()
    }
    for method in order:
        lines.append(f"{method:{width}}  " + "  ".join(f"{cells[method, against]:<22}" for against in AGAINST))
    return "\n".join(lines)


def draw(board: pd.DataFrame, name: str) -> Figure:
    """Return bars for each method, by each column, the best by the standard protocol first."""
    order = board[board.against == AGAINST[-1]].sort_values("lds", ascending=False).method.tolist()
    figure, axes = plots.figure(1, 1, panel_size=(7, 1 + 0.42 * len(order)))
    board = board.sort_values("method", key=lambda names: names.map(order.index), kind="stable")
    panels.bars(axes[0, 0], board, name="method", value="lds", by="against", low="lds_low", high="lds_high")
    panels.frame(axes[0, 0], x="LDS", title=f"bank {name}")
    panels.legend(figure)
    return figure
