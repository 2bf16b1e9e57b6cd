"""The papers' own numbers, typed once in a folder of <paper>.csv and checked against their texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd


@dataclass(frozen=True)
class PaperNumber:
    """One number as a paper prints it.

    Args:
        table: where it stands, e.g. "Table 1" or "Fig. 3".
        row: the row's name as printed, or "all" for a setting of the whole table or figure.
        column: what it is, in our names (`step_size`, `batch_size`, ...).
        value: the number.
        stderr: its standard error; nan when the paper states none.
        unit: in words; empty for a pure number.
        quote: the characters in the paper's text that it was read from.
    """

    table: str
    row: str
    column: str
    value: float
    stderr: float
    unit: str
    quote: str


@dataclass(frozen=True)
class PaperNumbers:
    """All numbers of one paper that have been typed in."""

    paper: str
    numbers: tuple[PaperNumber, ...]

    def get(self, table: str, row: str, column: str) -> PaperNumber:
        """Return one number; a KeyError lists what that table has."""
        for number in self.numbers:
            if (number.table, number.row, number.column) == (table, row, column):
                return number
        known = ", ".join(f"({number.row}, {number.column})" for number in self.in_table(table))
        raise KeyError(
            f"{self.paper}.csv has no number ({row}, {column}) in {table}; "
            f"it has: {known or 'nothing in that table'}."
        )

    def in_table(self, table: str) -> tuple[PaperNumber, ...]:
        """Return the numbers of one table or figure, in the order of the file."""
        return tuple(number for number in self.numbers if number.table == table)


def load_paper_numbers(paper: str, *, folder: str | Path) -> PaperNumbers:
    """Return the numbers of `paper` ("lissa", "pbrf", ...) from `folder`/<paper>.csv."""
    path = Path(folder) / f"{paper}.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    columns = [field.name for field in fields(PaperNumber)]
    if list(table.columns) != columns:
        raise ValueError(
            f"{path.as_posix()} needs the columns {','.join(columns)}, got {','.join(table.columns)}."
        )
    repeated = table[table.duplicated(["table", "row", "column"])]
    if len(repeated):
        raise ValueError(f"{path.as_posix()} has {tuple(repeated.iloc[0][:3])} twice; a number is typed once.")
    table = table.assign(value=table.value.astype(float), stderr=table.stderr.replace("", "nan").astype(float))
    return PaperNumbers(paper, tuple(PaperNumber(*row) for row in table.itertuples(index=False)))
