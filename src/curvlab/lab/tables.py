"""Tables of a result folder: CSV to be read by eye, packed with bzip2 where they are clouds of points.

Tables of ranks are packed by `rank_tables`, in half the space, with xz. The same numbers give the same bytes:
floats have so many significant digits, and a packed file carries no time.
"""

from __future__ import annotations

import bz2
import io
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from curvlab.lab import rank_tables

MAX_PLAIN_BYTES = 8_000  # a larger CSV is nothing that a person reads, and is a fifth as large when packed
RANKS = ".ranks.xz"
SUFFIXES = (RANKS, ".csv.bz2", ".csv.gz", ".csv")  # gzip: results of earlier code


def encoded(table: pd.DataFrame, name: str, *, digits: int = 6) -> tuple[str, bytes]:
    """Return the file's name, "<name>.csv", ".csv.bz2" or ".ranks.xz", and its bytes; without index.

    Args:
        table: to write.
        name: without suffix.
        digits: significant digits of floats.
    """
    rounded = table.map(partial(_rounded, digits=digits))
    return packed(rounded.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n"), name)


def packed(text: str, name: str) -> tuple[str, bytes]:
    """Return the same of a CSV's text."""
    content = text.encode()
    if len(content) <= MAX_PLAIN_BYTES:
        return f"{name}.csv", content
    if (ranks := rank_tables.pack_csv(text)) is not None:
        return f"{name}{RANKS}", ranks
    return f"{name}.csv.bz2", bz2.compress(content)


def as_written(table: pd.DataFrame, name: str, *, digits: int = 6) -> pd.DataFrame:
    """Return what a reader finds once the table is written."""
    file, content = encoded(table, name, digits=digits)
    if file.endswith(RANKS):
        return rank_tables.unpack(content)
    return pd.read_csv(io.BytesIO(content), compression="bz2" if file.endswith(".bz2") else None)


def names(folder: Path) -> list[str]:
    """Return the names of the tables in a result folder, sorted."""
    return sorted({path.name.removesuffix(suffix) for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")})


def table_path(folder: Path, name: str) -> Path:
    """Return where the table `name` lies, or, where there is none, would lie."""
    paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.is_file()), paths[-1])


def read_table(folder: Path, name: str, **settings: Any) -> pd.DataFrame:
    """Return the table `name` of a result folder, read by `pandas.read_csv` with `settings`.

    Raises:
        FileNotFoundError: there is no such table.
    """
    path = table_path(folder, name)
    if not path.name.endswith(RANKS):
        return pd.read_csv(path, **settings)
    ranks = rank_tables.unpack(path.read_bytes())
    return pd.read_csv(io.StringIO(ranks.to_csv(index=False)), **settings) if settings else ranks


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "") -> list[str]:
    """Return the lines of a table in Markdown; `rule` is the line below the heads where columns stand right."""
    return [
        f"| {' | '.join(heads)} |",
        rule or "|---" * len(heads) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _rounded(value: Any, *, digits: int) -> Any:
    """Format floats in columns of mixed type, which pandas' float_format leaves alone."""
    return float(f"%.{digits}g" % value) if isinstance(value, float) else value
