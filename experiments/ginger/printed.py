"""Tables 1 to 4 as the paper prints them, and what its text says of Table 1."""

from __future__ import annotations

import re
from functools import cache

import pandas as pd

from curvlab.lab import PaperNumbers, load_paper_numbers
from curvlab.lab.claims import ClaimResult, ClaimSheet, exact, judge
from experiments.papers import FOLDER

MODELS = ("ResNet-18", "ResNet-50")
MICRO = 1e-6  # the paper scales its training losses by it


@cache
def paper_numbers() -> PaperNumbers:
    """Return the paper's numbers."""
    return load_paper_numbers("ginger", folder=FOLDER)


def table_1() -> pd.DataFrame:
    """Return one row for each model and printed row: racer, rank, accuracy (a share), losses (nats), costs."""
    table = _by_half("Table 1", "model")
    return table.assign(accuracy=table.accuracy / 100, min_train_loss=table.min_train_loss * MICRO)


def table_2() -> pd.DataFrame:
    """Return one row for each half of the table and printed row: weights ("full", "lora"), racer, rank, costs.

    Further columns: ROUGE of each kind in percent and their mean (`rouge`), train_perplexity.
    """
    table = _by_half("Table 2", "weights")
    rouge = table[["rouge1", "rouge2", "rougeL"]].mean(axis=1)
    return table.assign(weights=table.weights.str.lower(), rouge=rouge)


def _by_half(table: str, name: str) -> pd.DataFrame:
    """Return one row for each half of a table, in the column `name`, and printed row: racer, rank, its numbers."""
    rows: dict[tuple[str, str], dict[str, float | str | int | None]] = {}
    for number in paper_numbers().in_table(table):
        if number.row != "all":
            half, column = number.column.split(" ")
            rows.setdefault((half, number.row), {name: half, **_place(number.row)})[column] = number.value
    return pd.DataFrame(rows.values()).sort_values(name, kind="stable", ignore_index=True)


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


# ------------------------------------------------------------------------------------ the text against the table
def judge_printed(claims: ClaimSheet, paper: pd.DataFrame) -> list[ClaimResult]:
    """Judge what the text says of `paper`, the printed Table 1."""
    losses = paper[paper.model == "ResNet-50"].groupby("racer").min_train_loss.min()
    place = int((losses < losses["ginger"]).sum()) + 1
    order = ", ".join(f"{racer} {loss / 1e-6:.3g}e-6" for racer, loss in losses.sort_values().items())
    text = table_2()
    ratio, of_text = (
        _growth(own[own.racer == "ginger"])
        for own in (paper[paper.model == "ResNet-18"], text[text.weights == "full"])
    )
    best = f"By its own table it is the best there: {order}."
    linear = (
        "Linear from rank 4 on: U' = (U p)V alone, 2dτ(τ + 1), is more than the printed FLOPs at rank 32. "
        f"In Table 2, all weights, which has it, the same ratio is {of_text:.1f}."
    )
    return [
        judge(claims.claim("printed-second-best"), place, exact(place, kind="printed"), if_not_reproduced=best),
        judge(claims.claim("printed-flops"), ratio, exact(ratio, kind="printed"), if_not_reproduced=linear),
    ]


def _growth(rows: pd.DataFrame) -> float:
    flops = rows.set_index("rank").flops
    return float((flops[32] - flops[16]) / (flops[16] - flops[8]))
