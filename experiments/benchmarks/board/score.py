"""A stranger's scores on a bank: a row beside the board's, and a picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.influence.bank import AGAINST, Array, Bank, BankScore, lds_of_predictions, load_bank
from curvlab.lab import panels, plots, tables
from experiments.benchmarks.board.banks import FOLDER, PRESETS
from experiments.benchmarks.board.compute import CEILING
from experiments.benchmarks.board.kept import label, published

YOURS, OUTPUT = "yours", Path("outputs/score")
COLUMNS = ["method", "against", "lds", "lds_low", "lds_high"]


def judge_file(name: str, path: str) -> None:
    """Print the rows of the board with that of a file's scores among them, and draw them."""
    try:
        bank = load_bank(name, None if "CURVLAB_BANKS" in os.environ else FOLDER)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    try:
        scores = np.load(path, allow_pickle=False)
        if not isinstance(scores, np.ndarray):
            raise ValueError("an archive of arrays; save one array by np.save")
        predicted = bank.predictions(scores)
        found = [lds_of_predictions([predicted], bank, against=against) for against in AGAINST]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}")
    yours = [dict(zip(COLUMNS, (YOURS, f.against, f.value, f.low, f.high), strict=True)) for f in found]
    best, ranks = board_of(bank.recipe["task"])
    board = pd.concat([pd.DataFrame(yours), best[COLUMNS]], ignore_index=True)
    networks = f"{len(found[0].per_network)} of {len(bank.single_run)} networks"
    print(f"bank {name}: {len(bank.subsets)} subsets, {networks}")
    print(text(board))
    for line in (*edges(best), *against_the_best(bank, predicted, best, ranks), *turned_round(found)):
        print(line)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    plots.write_png(draw(board, name), OUTPUT / f"{name}.png")
    print(f"{OUTPUT / name}.png")


def board_of(task: str, results: str | Path = "results") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a task's published rows, each method at its best damping, and their ranks; none where none are."""
    for preset in PRESETS:
        folder = Path(results) / "benchmarks" / "board" / preset
        if tables.table_path(folder, "best").is_file():
            best, ranks = (tables.read_table(folder, name) for name in ("best", "ranks"))
            if len(own := best[best.task == task]):
                return own, ranks[ranks.task == task]
    return pd.DataFrame(columns=[*COLUMNS, "damping"]), pd.DataFrame()


def against_the_best(bank: Bank, yours: Array, best: pd.DataFrame, ranks: pd.DataFrame) -> Iterator[str]:
    """Yield how far the scores are from the best of the board, paired: with the same draws for both."""
    for against in AGAINST:
        own = best[(best.against == against) & (best.method != CEILING)]
        if len(own):
            leader = own.sort_values("lds").iloc[-1]
            theirs = published(ranks, bank, label(leader.method, leader.damping))
            found = lds_of_predictions([yours, theirs], bank, against=against)
            told = f"{against}: yours less {leader.method}, the best: "
            yield told + f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f}), paired"


def edges(best: pd.DataFrame) -> Iterator[str]:
    """Yield where a method's best damping is an end of its grid, so that another may do better."""
    own = best[best["edge"].notna()] if "edge" in best else best[:0]
    for row in own.itertuples():
        yield f"{row.against}: {row.method} is best at the {row.edge} value of its grid, {row.damping:g}"


def turned_round(found: list[BankScore]) -> Iterator[str]:
    """Yield a warning where scores predict the opposite of what happens."""
    if all(score.value < 0 for score in found) and min(score.high for score in found) < 0:
        yield (
            "your scores correlate negatively with what retraining does. The board's convention is up-weighting: "
            "the change of a query's loss when an example gets more weight, so helpful examples score negative. "
            "Many libraries have the opposite sign: save minus the scores."
        )


def text(board: pd.DataFrame) -> str:
    """Return a line for each method, the best by the standard protocol first."""
    order = board[board.against == AGAINST[-1]].sort_values("lds", ascending=False).method
    width, cells = max(map(len, order)), {}
    lines = [f"{'':{width}}  " + "  ".join(f"{against:<22}" for against in AGAINST)]
    for row in board.itertuples():
        cells[row.method, row.against] = f"{row.lds:.3f} ({row.lds_low:.3f} to {row.lds_high:.3f})"
    for method in order:
        lines.append(f"{method:{width}}  " + "  ".join(f"{cells.get((method, a), ''):<22}" for a in AGAINST))
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
