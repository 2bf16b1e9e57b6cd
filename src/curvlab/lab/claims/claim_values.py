"""Values of claims that YAML alone can say: `value:` of an entry of claims.yaml, see `claim_sheet`.

A value is one statistic of one table: the mean over seeds of a column, the largest or smallest entry of a column,
the ratio of two columns, or the correlation of two columns. Columns may be expressions of columns, as
`DataFrame.eval` has them; names with blanks stand in backticks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab.claims.intervals import Interval, bootstrap_interval, exact, t_interval

MEANS = ("mean", "ratio")
EXTREMES = ("largest", "smallest")
CORRELATIONS = ("pearson", "spearman")
STATISTICS = (*MEANS, *EXTREMES, *CORRELATIONS)
OPTIONS = ("table", "where", "by", "across", "over", "unit", "low", "high", "otherwise")


@dataclass(frozen=True)
class Measured:
    """What a `value:` gives for one claim.

    Args:
        of: the group that it is of, e.g. a task; "" without `by`.
        value: the number; None when no row of the table counts.
        interval: where it lies; None with the value.
        fact: the numbers behind it, or why there are none, in a sentence.
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
    if named[0] in MEANS and "over" not in value:
        raise ValueError(f"`value: {named[0]}` needs `over`: the column of what is repeated, e.g. seed.")
    if named[0] in CORRELATIONS and not (isinstance(value[named[0]], list) and len(value[named[0]]) == 2):
        raise ValueError(f"`value: {named[0]}` needs two columns, e.g. [lissa, pbrf].")
    if ("low" in value) != ("high" in value) or ("low" in value and named[0] not in EXTREMES):
        raise ValueError(
            "`low` and `high` are the columns of an interval, both or none, of a largest or smallest."
        )
    if "across" in value and not (isinstance(value["across"], Mapping) and len(value["across"]) == 1):
        raise ValueError("`across` needs one column of names and one of values, e.g. {method: area}.")
    if "across" in value and "over" not in value:
        raise ValueError("`across` needs `over`: the columns that tell its rows apart, e.g. seed.")


def measure(value: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], *, seed: int = 0) -> Iterator[Measured]:
    """Yield what a `value:` gives, one for each group of `by`; without `by` one, of all rows.

    With `otherwise` a group none of whose rows counts has no value for that reason; without it, it is left out.

    Args:
        value: as `check` lets pass.
        tables: of a result folder, by name.
        seed: of the resamples of a bootstrap.

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
            yield _of_rows("", rows, value, seed)
        else:
            for group, own in (table if "otherwise" in value else rows).groupby(value["by"], sort=False):
                of = "-".join(map(str, group)) if isinstance(group, tuple) else str(group)
                counted = own.loc[own.index.intersection(rows.index)]
                lacking = Measured(of, None, None, value.get("otherwise", ""))
                yield lacking if counted.empty else _of_rows(of, counted, value, seed)
    except (KeyError, TypeError, SyntaxError, AttributeError, NameError) as error:  # as pandas raises them
        columns = ", ".join(map(str, table.columns))
        raise ValueError(f"`value` does not fit {name}.csv ({error}), whose columns are: {columns}.") from error


def _of_rows(of: str, rows: pd.DataFrame, value: Mapping[str, Any], seed: int) -> Measured:
    if "across" in value:
        ((names, column),) = value["across"].items()
        rows = rows.pivot_table(index=value["over"], columns=names, values=column, sort=False).reset_index()
    if any(statistic in value for statistic in MEANS):
        return _mean(of, rows, value)
    if any(statistic in value for statistic in EXTREMES):
        return _extreme(of, rows, value)
    return _correlation(of, rows, value, seed)


def _mean(of: str, rows: pd.DataFrame, value: Mapping[str, Any]) -> Measured:
    """Measure the mean over repetitions; of a ratio the geometric mean, with the interval of the logarithm."""
    is_ratio = "ratio" in value
    column = _column(rows, value["ratio"] if is_ratio else value["mean"])
    samples = _over(rows, np.log(column) if is_ratio else column, value["over"])
    found = t_interval(samples, unit=value.get("unit", _plural(value["over"])))
    middle = float(samples.mean())
    if is_ratio:
        middle, found = math.exp(middle), found.mapped(math.exp)
    return Measured(of, middle, found, _listed(samples, value, is_ratio))


def _extreme(of: str, rows: pd.DataFrame, value: Mapping[str, Any]) -> Measured:
    """Measure the largest or smallest entry; exact, or with the interval that stands in its row."""
    word = "largest" if "largest" in value else "smallest"
    column = _column(rows, value[word])
    # nan must not be passed over: what could not be computed may be the largest.
    place = int(np.argmax(column.isna())) if column.isna().any() else int(getattr(np, _PLACES[word])(column))
    found = float(column.iloc[place])
    kind = f"{word} of {len(rows)} {value.get('unit', 'rows')}"
    interval = exact(found, kind=kind)
    if "low" in value:
        low, high = (float(_column(rows, value[end]).iloc[place]) for end in ("low", "high"))
        interval = Interval(low, high, kind, len(rows))
    names = [name for name in rows if rows[name].nunique() > 1 and not pd.api.types.is_float_dtype(rows[name])]
    where = ", ".join(f"{name} {rows[name].iloc[place]}" for name in names)
    return Measured(of, found, interval, f"The {word}{f' is at {where}' if where else ''}: {found:.3g}.")


def _correlation(of: str, rows: pd.DataFrame, value: Mapping[str, Any], seed: int) -> Measured:
    """Measure a correlation: its mean over repetitions, or without `over` of all rows, which are resampled."""
    word = "pearson" if "pearson" in value else "spearman"
    x, y = (_column(rows, expression) for expression in value[word])
    if "over" in value:
        groups = pd.DataFrame({"x": x, "y": y}).groupby([rows[name] for name in _names(value["over"])], sort=False)
        samples = np.array([_correlate(word, own.x.to_numpy(), own.y.to_numpy()) for _, own in groups])
        interval = t_interval(samples, unit=value.get("unit", _plural(value["over"])))
        return Measured(of, float(samples.mean()), interval, _listed(samples, value, False))
    found = _correlate(word, x.to_numpy(), y.to_numpy())
    interval = bootstrap_interval(
        (x, y),
        lambda left, right: _correlate(word, left, right),
        unit=value.get("unit", "rows"),
        generator=np.random.default_rng(seed),
    )
    return Measured(of, found, interval, f"Over {len(rows)} {value.get('unit', 'rows')}.")


_PLACES = {"largest": "argmax", "smallest": "argmin"}


def _column(rows: pd.DataFrame, expression: Any) -> pd.Series:
    found = rows.eval(str(expression))
    return pd.Series(found, index=rows.index).astype(float)


def _over(rows: pd.DataFrame, column: pd.Series, over: str | list[str]) -> np.ndarray:
    """Return the mean of each repetition, (n,); nan where one of its rows is nan."""
    groups = column.groupby([rows[name] for name in _names(over)], sort=False)
    return np.asarray(groups.agg(lambda own: own.mean(skipna=False)), dtype=float)


def _correlate(word: str, x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:  # not defined; scipy warns
        return float("nan")
    return float((stats.pearsonr if word == "pearson" else stats.spearmanr)(x, y).statistic)


def _names(over: str | list[str]) -> list[str]:
    return [over] if isinstance(over, str) else list(over)


def _plural(over: str | list[str]) -> str:
    return f"{_names(over)[-1]}s"


def _listed(samples: np.ndarray, value: Mapping[str, Any], logarithms: bool) -> str:
    numbers = ", ".join(f"{number:.3g}" for number in (np.exp(samples) if logarithms else samples))
    return f"By {_names(value['over'])[-1]}: {numbers}."
