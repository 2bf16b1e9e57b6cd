"""When two results are equal: to a tolerance, and but for what measures time and memory.

Numbers agree when they differ by at most 1e-4 of the first one, or by 1e-9; nan agrees with nan; text and verdicts
agree when they are the same. `X`, `X_low` and `X_high`, a value and its interval, may be near zero by chance: each
has 1e-4 of the interval's width, too. Left out are columns with a word of `TIMED` in their names, tables named
`timing` or `timings`, and the tables and claims that a target declares as its `timings`.

Another processor rounds otherwise, and the training of a network makes more of it. So a published result stays as
it is where numbers agree by `ROUNDING` and no claim has `fallen`; `make verify` tells of it, and takes rtol=2e-3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from curvlab.lab import tables
from curvlab.lab.claims.claim_sheet import load_claims
from curvlab.lab.claims.claims import ClaimResult
from curvlab.lab.targets.target import Target

RTOL, ATOL = 1e-4, 1e-9
# Measured on ngd-fig4 (smoke): two runs on one processor are equal to the last byte, runs with AVX-512 and with
# AVX2 up to 1.4e-3 apart, where an interval ends near zero.
ROUNDING, SHARE_OF_INTERVAL = 2e-3, 0.05
TIMED = {"seconds", "milliseconds", "ms", "time", "cpu", "wall", "memory", "peak", "bytes", "mib", "gib"}


def differences(
    target: Target, committed: Path, again: Path, *, rtol: float = RTOL, by: Sequence[str] = ("task",)
) -> Iterator[str]:
    """Yield a line for each column, table and verdict that differs between two result folders of a target.

    Args:
        target: its `timings` are left out.
        committed: the result as it is published.
        again: the same; or a variation of it, of which those tables count that say in columns what a row is of.
        rtol: of numbers.
        by: these columns.
    """
    in_part = again.name != committed.name
    before, after = (
        {name: tables.read_table(folder, name) for name in compared(target, tables.names(folder))}
        for folder in (committed, again)
    )
    if in_part:
        before, after = (
            {name: table for name, table in of.items() if set(by) <= set(table)} for of in (before, after)
        )
    yield from other_tables(before, after, in_part=in_part, rtol=rtol)
    if in_part:
        return
    yield from fallen(target, load_claims(committed), load_claims(again), rtol=max(rtol, ROUNDING))


def fallen(
    target: Target, before: Iterable[ClaimResult], after: Iterable[ClaimResult], *, rtol: float = ROUNDING
) -> Iterator[str]:
    """Yield a line for each claim whose verdict changes, or whose value moves by rtol and 5 % of its interval."""
    old, new = ({result.claim.id: result for result in results} for results in (before, after))
    for claim in sorted(old.keys() | new.keys()):
        if any(fnmatchcase(claim, left_out) for left_out in target.timings):
            continue
        a, b = old.get(claim), new.get(claim)
        if a is None or b is None or a.verdict != b.verdict or (a.value is None) != (b.value is None):
            words = " -> ".join("not judged" if each is None else each.verdict for each in (a, b))
            yield f"claim {claim}: {words}"
        elif a.value is not None and b.value is not None and a.interval is not None:
            width = a.interval.high - a.interval.low
            room = max(SHARE_OF_INTERVAL * width if math.isfinite(width) else 0.0, rtol * abs(a.value), ATOL)
            if not abs(a.value - b.value) <= room:
                yield f"claim {claim}: {a.value:.6g} -> {b.value:.6g}"


def compared(target: Target, names: Iterable[str]) -> list[str]:
    """Return the names of the tables that are compared."""
    left_out = ("timing", "timings", *target.timings)
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in left_out)]


def other_tables(
    before: Mapping[str, pd.DataFrame],
    after: Mapping[str, pd.DataFrame],
    *,
    in_part: bool = False,
    rtol: float = RTOL,
) -> Iterator[str]:
    """Yield a line for each table, and each of its columns, that differs; `in_part`: rows that were not there."""
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            yield f"{name}.csv is only among the {'committed' if name in before else 'new'} tables"
        elif not in_part:
            yield from (f"{name}.csv: {line}" for line in _other_columns(before[name], after[name], rtol))
        else:
            yield from (f"{name}.csv: {line}" for line in _other_rows(before[name], after[name], rtol))


def _other_columns(old: pd.DataFrame, new: pd.DataFrame, rtol: float) -> Iterator[str]:
    if list(old) != list(new) or len(old) != len(new):
        columns = ", ".join(str(name) for name in old.columns.symmetric_difference(new.columns))
        yield f"{len(old)} rows -> {len(new)}" + (f"; columns only in one: {columns}" if columns else "")
        return
    for name in old:
        if _is_timed(name):
            continue
        same = _agree(old[name], new[name], rtol, widths=_widths(old, str(name)))
        if not same.all():
            row = int(np.argmin(same))
            values = f"{old[name].iloc[row]} -> {new[name].iloc[row]}"
            yield f"{name}: {(~same).sum()} of {len(same)} differ, e.g. row {row}: {values}"


def _other_rows(old: pd.DataFrame, new: pd.DataFrame, rtol: float) -> Iterator[str]:
    """Yield a line for each new row that no row of the same task equals."""
    columns = [name for name in new if name in old and not _is_timed(name)]
    tasks = new.task if "task" in new else [""] * len(new)
    for row, (task, values) in enumerate(zip(tasks, new[columns].itertuples(index=False), strict=True)):
        candidates = old.loc[old.task == task, columns] if "task" in new else old[columns]
        repeated = pd.DataFrame([values] * len(candidates), columns=columns, index=candidates.index)
        same = np.logical_and.reduce([_agree(candidates[name], repeated[name], rtol) for name in columns])
        if not np.any(same):
            of = (f" of {task}", " of this task") if task else ("", "")
            yield f"row {row}{of[0]} is not among the {len(candidates)} committed rows{of[1]}"


def _is_timed(column: object) -> bool:
    return bool(TIMED & set(re.findall("[a-z]+", str(column).lower())))


def _widths(table: pd.DataFrame, column: str) -> np.ndarray:
    """Return the widths of the intervals that a column's numbers belong to; zeros where it has none."""
    ends = [f"{re.sub('_(low|high)$', '', column)}_{end}" for end in ("low", "high")]
    if not all(end in table and pd.api.types.is_numeric_dtype(table[end]) for end in ends):
        return np.zeros(len(table))
    low, high = (table[end].to_numpy(float) for end in ends)
    return np.nan_to_num(high - low, posinf=0.0, neginf=0.0)


def _agree(old: pd.Series, new: pd.Series, rtol: float, *, widths: np.ndarray | float = 0.0) -> np.ndarray:
    if all(pd.api.types.is_numeric_dtype(column) for column in (old, new)):
        room = ATOL + rtol * widths
        return np.isclose(new.to_numpy(float), old.to_numpy(float), rtol=rtol, atol=room, equal_nan=True)
    texts = [column.astype(object).where(column.notna(), "").astype(str).to_numpy() for column in (old, new)]
    return np.asarray(texts[0] == texts[1])
