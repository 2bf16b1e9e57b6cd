"""Values of claims that YAML alone can say: `value:` of an entry of claims.yaml, see `claim_sheet`.

A value is one statistic of one table: the mean of a column over seeds, or its largest or smallest entry. Columns
may be expressions of columns, as `DataFrame.eval` has them; names with blanks stand in backticks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from curvlab.lab.claims.intervals import Interval, exact, t_interval

STATISTICS = ("mean", "largest", "smallest")
OPTIONS = ("table", "where", "by", "over", "unit", "low", "high", "samples", "otherwise")


@dataclass(frozen=True)
class Measured:
    """What a `value:` gives for one claim.

    Args:
        of: the group that it is of, e.g. a task; "" without `by`.
        value: the number; None when no row of the table counts.
        interval: where it lies; None with the value.
        fact: the numbers behind it, or why there are none, in a sentence; "" of a single row.
    """

    of: str
    value: float | None
    interval: Interval | None
    fact: str


def check(value: Any) -> None:
    """Raise a ValueError that says what is wrong with a `value:`, before any table is read."""
    if not isinstance(value, Mapping):
        raise ValueError(f"`value` must be a mapping with one of {', '.join(STATISTICS)}.")
    if unknown := sorted(set(value) - {*STATISTICS, *OPTIONS}):
        raise ValueError(
            f"`value` has unknown keys: {', '.join(unknown)}; known are {', '.join((*STATISTICS, *OPTIONS))}."
        )
    named = [name for name in STATISTICS if name in value]
    if len(named) != 1:
        raise ValueError(f"`value` needs one of {', '.join(STATISTICS)}, got {', '.join(named) or 'none'}.")
    if "mean" in value and "over" not in value:
        raise ValueError("`value: mean` needs `over`: the column of what is repeated, e.g. seed.")
    if ("low" in value) != ("high" in value) or ("low" in value and "mean" in value):
        raise ValueError(
            "`low` and `high` are the columns of an interval, both or none, of a largest or smallest."
        )
    if "samples" in value and "low" not in value:
        raise ValueError(
            "`samples` is the column of how many values a bootstrap drew from; name its `low`, `high`."
        )


def measure(value: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Iterator[Measured]:
    """Yield what a `value:` gives, one for each group of `by`; without `by` one, of all rows.

    With `otherwise` a group none of whose rows counts has no value for that reason; without it, it is left out.

    Args:
        value: as `check` lets pass.
        tables: of a result folder, by name.

    Raises:
        ValueError: an expression does not fit the table; names both.
    """
    name = str(value.get("table", "table"))
    table = tables[name]
    try:
        rows = table.query(value["where"]) if "where" in value else table
        if rows.empty and ("by" not in value or table.empty or "otherwise" not in value):
            yield Measured("", None, None, value.get("otherwise", f"{name}.csv has no row that counts here."))
        elif "by" not in value:
            yield _of_rows("", rows, value)
        else:
            for group, own in (table if "otherwise" in value else rows).groupby(value["by"], sort=False):
                of = ", ".join(map(str, group)) if isinstance(group, tuple) else str(group)
                counted = own.loc[own.index.intersection(rows.index)]
                lacking = Measured(of, None, None, value.get("otherwise", ""))
                yield lacking if counted.empty else _of_rows(of, counted, value)
    except (KeyError, TypeError, SyntaxError, AttributeError, NameError) as error:  # as pandas raises them
        columns = ", ".join(map(str, table.columns))
        raise ValueError(f"`value` does not fit {name}.csv ({error}), whose columns are: {columns}.") from error


def _of_rows(of: str, rows: pd.DataFrame, value: Mapping[str, Any]) -> Measured:
    return _mean(of, rows, value) if "mean" in value else _extreme(of, rows, value)


def _mean(of: str, rows: pd.DataFrame, value: Mapping[str, Any]) -> Measured:
    """Measure the mean over repetitions, each the mean of its rows; nan where one of its rows is nan."""
    over = [value["over"]] if isinstance(value["over"], str) else list(value["over"])
    groups = _column(rows, value["mean"]).groupby([rows[name] for name in over], sort=False)
    samples = np.asarray(groups.agg(lambda own: own.mean(skipna=False)), dtype=float)
    interval = t_interval(samples, unit=value.get("unit", f"{over[-1]}s"))
    fact = f"By {over[-1]}: {', '.join(f'{number:.3g}' for number in samples)}."
    return Measured(of, float(samples.mean()), interval, fact)


def _extreme(of: str, rows: pd.DataFrame, value: Mapping[str, Any]) -> Measured:
    """Measure the largest or smallest entry; exact, or with the interval that stands in its row."""
    word = "largest" if "largest" in value else "smallest"
    column = _column(rows, value[word])
    # nan must not be passed over: what could not be computed may be the largest.
    place = int(np.argmax(column.isna())) if column.isna().any() else int(getattr(np, _PLACES[word])(column))
    found = float(column.iloc[place])
    unit, alone = value.get("unit", "rows"), len(rows) == 1
    kind = "one run" if alone and unit == "rows" else f"{word} of {len(rows)} {unit}"
    interval = exact(found, kind=kind)
    if "low" in value:
        low, high = (float(_column(rows, value[end]).iloc[place]) for end in ("low", "high"))
        interval = Interval(low, high, kind, len(rows))
        if "samples" in value:
            drawn = int(_column(rows, value["samples"]).iloc[place])
            interval = Interval(low, high, f"bootstrap 95 %, {drawn} {unit}", drawn)
    names = [name for name in rows if rows[name].nunique() > 1 and not pd.api.types.is_float_dtype(rows[name])]
    where = ", ".join(f"{name} {rows[name].iloc[place]}" for name in names)
    if alone or column.nunique(dropna=False) == 1:  # there is nothing that it is the largest of
        return Measured(of, found, interval, "")
    return Measured(of, found, interval, f"The {word}{f' is at {where}' if where else ''}: {found:.3g}.")


_PLACES = {"largest": "argmax", "smallest": "argmin"}


def _column(rows: pd.DataFrame, expression: Any) -> pd.Series:
    found = rows.eval(str(expression))
    return pd.Series(found, index=rows.index).astype(float)
