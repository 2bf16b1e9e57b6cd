"""The variations of a target, put together: their tables below each other, with the overridden keys as columns."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvlab.lab.targets.target import named_targets

SWEEP = "sweep"  # the folder beside a preset's own tables: committed with them, and no variation itself


def gather(names: Sequence[str], root: str | Path = "results") -> int:
    """Write <preset>/sweep/<table>.csv for the finished variations <preset>+<overrides> of targets.

    Each of their rows says which variation it is from, at which commit, and with which overrides; where a table
    has a column of an override's name already, it is "override NAME". Print the folders; return the exit status.

    Args:
        names: of targets or of groups of them.
        root: of the results.
    """
    found = 0
    for target in named_targets(names):
        folders: dict[str, list[Path]] = {}
        for folder in sorted((Path(root) / target.key).glob("*+*")):
            if (folder / "run.json").is_file():
                folders.setdefault(folder.name.partition("+")[0], []).append(folder)
            else:
                print(f"{folder.as_posix()}: left out, its run has not finished (no run.json)", file=sys.stderr)
        for preset, variations in folders.items():
            gathered = Path(root) / target.key / preset / SWEEP
            _write(gathered, variations)
            print(f"{gathered.as_posix()}: {len(variations)} variations")
            found += 1
    if not found:
        print(f"no finished variation of {', '.join(names)} under {Path(root).as_posix()}", file=sys.stderr)
    return 0 if found else 1


def _write(gathered: Path, variations: Sequence[Path]) -> None:
    import pandas as pd  # after the names: they need no package

    from curvlab.files import write_atomically
    from curvlab.lab import tables
    from curvlab.lab.runs.record import read_record

    parts: dict[str, list[pd.DataFrame]] = {}
    for folder in variations:
        record = read_record(folder)
        about = {"variation": folder.name, "commit": str(record["assembled"]["commit"])[:8]} | _overrides(record)
        for name in tables.names(folder):
            table = tables.read_table(folder, name, dtype=str, keep_default_na=False)  # digits stay as they are
            for place, (key, value) in enumerate(about.items()):
                table.insert(place, f"override {key}" if key in table else key, value)
            parts.setdefault(name, []).append(table)
    for name, own in parts.items():
        file, content = tables.packed(pd.concat(own).to_csv(index=False, lineterminator="\n"), name)
        write_atomically(gathered / file, content)


def _overrides(record: dict[str, Any]) -> dict[str, str]:
    """Return the overrides that make the variation, by their keys, as they were typed."""
    words = shlex.split(record["python_command"])  # of which those after `python -m experiments run TARGET`
    pairs = [word.lstrip("+").partition("=")[::2] for word in words if "=" in word]
    return {key: value for key, value in pairs if key != "preset"}
