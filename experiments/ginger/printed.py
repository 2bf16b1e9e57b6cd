"""Tables 1 to 4 as the paper prints them."""

from __future__ import annotations

import re
from functools import cache

import pandas as pd

from curvlab.lab import PaperNumbers, load_paper_numbers
from experiments.papers import FOLDER

MODELS = ("ResNet-18", "ResNet-50")
MICRO = 1e-6  # the paper scales its training losses by it


@cache
def paper_numbers() -> PaperNumbers:
    """Return the paper's numbers."""
    return load_paper_numbers("ginger", folder=FOLDER)


def table_1() -> pd.DataFrame:
    """Return one row for each model and printed row: racer, rank, accuracy (a share), losses (nats), costs."""
    rows: dict[tuple[str, str], dict[str, float | str | int | None]] = {}
    for number in paper_numbers().in_table("Table 1"):
        model, column = number.column.split(" ")
        place = {"model": model, **_place(number.row)}
        rows.setdefault((model, number.row), dict(place))[column] = number.value
    table = pd.DataFrame(rows.values()).sort_values("model", kind="stable", ignore_index=True)
    return table.assign(accuracy=table.accuracy / 100, min_train_loss=table.min_train_loss * MICRO)


def table_2() -> pd.DataFrame:
    """Return one row for each half of the table and printed row: weights ("full", "lora"), racer, rank, costs.

    Further columns: ROUGE of each kind in percent and their mean (`rouge`), train_perplexity.
    """
    rows: dict[tuple[str, str], dict[str, float | str | int | None]] = {}
    for number in paper_numbers().in_table("Table 2"):
        if number.row != "all":
            half, column = number.column.split(" ")
            place = {"weights": half.lower(), **_place(number.row)}
            rows.setdefault((half, number.row), dict(place))[column] = number.value
    table = pd.DataFrame(rows.values()).sort_values("weights", kind="stable", ignore_index=True)
    return table.assign(rouge=table[["rouge1", "rouge2", "rougeL"]].mean(axis=1))


def sensitivity(table: str) -> pd.DataFrame:
    """Return Table 3 or 4, one row for each cell: decay, rank, and accuracy (a share) or min_train_loss (nats)."""
    rows = []
    for number in paper_numbers().in_table(table):
        _, rank, column = number.column.split(" ")
        scale = 1 / 100 if column == "accuracy" else MICRO
        rows.append({"decay": float(number.row), "rank": int(rank), column: number.value * scale})
    return pd.DataFrame(rows)


def _place(row: str) -> dict[str, str | int | None]:
    rank = re.search(r"tau=(\d+)", row)
    return {"racer": row.partition(" ")[0].lower(), "rank": int(rank[1]) if rank else None}
