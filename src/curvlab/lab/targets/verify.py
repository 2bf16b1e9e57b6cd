"""`make verify`: compute results again into a temporary folder, and say what differs from the committed ones.

Compared are all tables and the verdicts of all claims. Numbers agree when they differ by at most 1e-4 of the
committed one, or by 1e-9; nan agrees with nan; text and verdicts agree when they are the same. Left out is what
measures time and memory: columns with a word of `TIMED` in their names, tables named `timing` or `timings`, and
the tables and claims that a target declares as its `timings`. And every result of the targets, of all presets, is
judged again from its tables: its claims.json must come out as it is.

Of a large preset one task can be computed again, `verify lissa-tab1 preset=laptop task=mlp_mnist`: then every row
of a table with a column `task` must be among the committed rows, and no verdict is compared.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from curvlab.lab import tables
from curvlab.lab.reporting.claims import load_claims, plain_result
from curvlab.lab.runs.record import read_record
from curvlab.lab.targets.command import preset_of, run_side_by_side
from curvlab.lab.targets.help import recorded_seconds
from curvlab.lab.targets.stale import stale_parts
from curvlab.lab.targets.target import ROOT, Found, Target, named_targets, published

RTOL, ATOL = 1e-4, 1e-9
TIMED = {"seconds", "milliseconds", "ms", "time", "cpu", "wall", "memory", "peak", "bytes", "mib", "gib"}


def verify(arguments: Sequence[str], results: Path = ROOT / "results") -> int:
    """Print one line for each difference; return 1 when there is one, or when a target failed.

    Args:
        arguments: names of targets or of groups, all figures when there are none; overrides; and `seconds=120`
            for those alone whose code has changed since they were published, the cheapest first, as many as took
            120 s in all; and `rtol=0.1` for another tolerance, as another processor rounds otherwise.
        results: the committed ones.
    """
    names = [argument for argument in arguments if "=" not in argument]
    limits = [float(argument.partition("=")[2]) for argument in arguments if argument.startswith("seconds=")]
    rtol = next((float(word.partition("=")[2]) for word in arguments if word.startswith("rtol=")), RTOL)
    own = ("seconds=", "rtol=")
    overrides = [word for word in arguments if word not in names and not word.startswith(own)]
    preset = preset_of(overrides)
    chosen = {target.key for target in named_targets(names or ["figures", "bench"])}
    count = 0
    for target, folder in published(results):
        if target.key in chosen:
            for line in judged_otherwise(target, folder):
                print(f"{target.make_name} ({folder.name}): {line}")
                count += 1
    committed = [(target, results / target.key / preset) for target in named_targets(names or ["figures"])]
    committed = [(target, folder) for target, folder in committed if (folder / "run.json").is_file()]
    if limits:
        committed = _cheapest_stale(committed, preset, min(limits))
    if not committed:
        print(f"nothing to compute: no {preset} result {'of changed code ' if limits else ''}among these targets")
        return 1 if count else 0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [f"results.root={temporary}/results", f"store.root={temporary}/store", "tracker=none"]
        status = run_side_by_side([target for target, _ in committed], [*overrides, *folders])
        for target, folder in committed:
            for again in (Path(temporary) / "results" / target.key).glob("*"):  # none when it failed
                for line in differences(target, folder, again, rtol=rtol):
                    print(f"{target.make_name}: {line}")
                    count += 1
    print(f"{len(committed)} targets ({preset}): {count or 'no'} difference{'' if count == 1 else 's'}")
    return 1 if count or status else 0


def judged_otherwise(target: Target, folder: Path) -> Iterator[str]:
    """Yield a line for each claim of a result folder that its tables, judged again, give another entry."""
    from curvlab.lab.targets.execution import Computed, judged

    results = (load_claims(folder), judged(target, Computed.of(folder)))
    old, new = ({result.claim.id: plain_result(result) for result in of} for of in results)
    for claim in sorted(old.keys() | new.keys()):
        before, after = old.get(claim, {}), new.get(claim, {})
        if changed := [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]:
            yield f"judged again, claim {claim} has another {', '.join(sorted(changed))}: `make judge` writes it"


def differences(target: Target, committed: Path, again: Path, *, rtol: float = RTOL) -> Iterator[str]:
    """Yield a line for each column, table and verdict that differs between two result folders of a target.

    Args:
        target: its `timings` are left out.
        committed: the result as it is published.
        again: the same; or a variation of it, which has a part of its rows.
        rtol: of numbers.
    """
    in_part = again.name != committed.name
    before, after = tables.names(committed), tables.names(again)
    for name in sorted({*before, *after}):
        if name in ("timing", "timings") or any(fnmatchcase(name, left_out) for left_out in target.timings):
            continue
        if name not in before or name not in after:
            yield f"{name}.csv is only among the {'committed' if name in before else 'new'} tables"
            continue
        old, new = tables.read_table(committed, name), tables.read_table(again, name)
        if not in_part:
            yield from (f"{name}.csv: {line}" for line in _other_columns(old, new, rtol))
        elif "task" in new:
            yield from (f"{name}.csv: {line}" for line in _other_rows(old, new, rtol))
    if in_part:
        return
    verdicts = [
        {result.claim.id: result.verdict for result in load_claims(folder)} for folder in (committed, again)
    ]
    for claim in sorted(verdicts[0].keys() | verdicts[1].keys()):
        old_word, new_word = (of.get(claim, "not judged") for of in verdicts)
        if old_word != new_word and not any(fnmatchcase(claim, left_out) for left_out in target.timings):
            yield f"claim {claim}: {old_word} -> {new_word}"


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
    for row, (task, values) in enumerate(zip(new.task, new[columns].itertuples(index=False), strict=True)):
        candidates = old.loc[old.task == task, columns]
        repeated = pd.DataFrame([values] * len(candidates), columns=columns, index=candidates.index)
        same = np.logical_and.reduce([_agree(candidates[name], repeated[name], rtol) for name in columns])
        if not np.any(same):
            yield f"row {row} of {task} is not among the {len(candidates)} committed rows of this task"


def _is_timed(column: object) -> bool:
    return bool(TIMED & set(re.findall("[a-z]+", str(column).lower())))


def _agree(old: pd.Series, new: pd.Series, rtol: float) -> np.ndarray:
    if all(pd.api.types.is_numeric_dtype(column) for column in (old, new)):
        return np.isclose(new.to_numpy(float), old.to_numpy(float), rtol=rtol, atol=ATOL, equal_nan=True)
    texts = [column.astype(object).where(column.notna(), "").astype(str).to_numpy() for column in (old, new)]
    return np.asarray(texts[0] == texts[1])


def _cheapest_stale(committed: Found, preset: str, seconds: float) -> Found:
    chosen: Found = []
    for target, folder in sorted(committed, key=lambda found: recorded_seconds(found[0], preset) or 0.0):
        if stale_parts(target, read_record(folder)):
            seconds -= recorded_seconds(target, preset) or 0.0
            if seconds < 0:
                break
            chosen.append((target, folder))
    return chosen
