"""When two results are equal: to a tolerance, and but for what measures time and memory.

Numbers agree when they differ by at most 1e-4 of the first one, or by 1e-9; nan agrees with nan; text and verdicts
agree when they are the same. Left out are columns with a word of `TIMED` in their names, tables named `timing` or
`timings`, and the tables and claims that a target declares as its `timings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from curvlab.lab import tables
from curvlab.lab.claims.claim_sheet import load_claims
from curvlab.lab.targets.target import Target

RTOL, ATOL = 1e-4, 1e-9
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
    verdicts = [
        {result.claim.id: result.verdict for result in load_claims(folder)} for folder in (committed, again)
    ]
    for claim in sorted(verdicts[0].keys() | verdicts[1].keys()):
        old_word, new_word = (of.get(claim, "not judged") for of in verdicts)
        if old_word != new_word and not any(fnmatchcase(claim, left_out) for left_out in target.timings):
            yield f"claim {claim}: {old_word} -> {new_word}"


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
        same = _agree(old[name], new[name], rtol)
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


def _agree(old: pd.Series, new: pd.Series, rtol: float) -> np.ndarray:
    if all(pd.api.types.is_numeric_dtype(column) for column in (old, new)):
        return np.isclose(new.to_numpy(float), old.to_numpy(float), rtol=rtol, atol=ATOL, equal_nan=True)
    texts = [column.astype(object).where(column.notna(), "").astype(str).to_numpy() for column in (old, new)]
    return np.asarray(texts[0] == texts[1])
