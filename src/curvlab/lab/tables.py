"""Tables of a result folder: CSV to be read by eye, gzipped where they are clouds of points.

The same numbers give the same bytes: floats have so many significant digits, and a gzip file carries no time.
"""

from __future__ import annotations

import gzip
import io
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

MAX_PLAIN_BYTES = 12_000  # a larger CSV is nothing that a person reads, and is a quarter as large with gzip


def encoded(table: pd.DataFrame, name: str, *, digits: int = 6) -> tuple[str, bytes]:
    """Return the file's name, "<name>.csv" or "<name>.csv.gz", and its bytes; without index.

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
    return f"{name}.csv.gz", gzip.compress(content, mtime=0)


def as_written(table: pd.DataFrame, name: str, *, digits: int = 6) -> pd.DataFrame:
    """Return what a reader finds once the table is written."""
    content = encoded(table, name, digits=digits)[1]
    return pd.read_csv(io.BytesIO(content), compression="gzip" if content[:2] == b"\x1f\x8b" else None)


def names(folder: Path) -> list[str]:
    """Return the names of the tables in a result folder, sorted."""
    return sorted({path.name.partition(".csv")[0] for path in (*folder.glob("*.csv"), *folder.glob("*.csv.gz"))})


def table_path(folder: Path, name: str) -> Path:
    """Return where the table `name` lies, or, where there is none, would lie."""
    packed_path = folder / f"{name}.csv.gz"
    return packed_path if packed_path.is_file() else folder / f"{name}.csv"


def read_table(folder: Path, name: str, **settings: Any) -> pd.DataFrame:
    """Return the table `name` of a result folder, read by `pandas.read_csv` with `settings`.

    Raises:
        FileNotFoundError: there is no such table.
    """
    return pd.read_csv(table_path(folder, name), **settings)


def _rounded(value: Any, *, digits: int) -> Any:
    """Format floats in columns of mixed type, which pandas' float_format leaves alone."""
    return float(f"%.{digits}g" % value) if isinstance(value, float) else value
