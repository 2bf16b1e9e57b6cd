"""`make stale`: published results whose numbers come from code that has changed since."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.target.discovery import ROOT
from experiments.target.published import published


def print_stale() -> int:
    """Print every stale result with the units and the files that changed; return 1 when there is one."""
    from curvlab.runs.record import NOT_RECORDED

    count = 0
    for _, folder in published():
        reasons = stale_units(folder)
        if reasons:
            count += 1
            print(f"{folder.as_posix()}")
            for reason in reasons:
                print(f"  {reason}")
    print(f"{count} stale results." if count else "No published result is stale.")
    print(f'Results that say "{NOT_RECORDED}" cannot be checked.')
    return 1 if count else 0


def stale_units(folder: Path) -> list[str]:
    """Return a line for each kind of unit of a result whose code has changed since it was computed."""
    from curvlab.runs.origins import is_stale
    from curvlab.runs.record import NOT_RECORDED, read_record

    units = read_record(folder).get("units", NOT_RECORDED)
    if units == NOT_RECORDED:
        return []
    return [_reason(unit) for unit in units if is_stale(unit)]


def _reason(unit: Mapping[str, Any]) -> str:
    from curvlab.runs.fingerprint import source_files

    files = [str(path.relative_to(ROOT)) for path in source_files(unit["roots"]) if path.is_relative_to(ROOT)]
    changed = subprocess.run(
        ["git", "diff", "--name-only", str(unit["commit"]), "--", *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    names = changed.stdout.split() if changed.returncode == 0 else []
    since = f": {', '.join(names)}" if names else ""
    tree = "" if unit["clean"] is True else " with changes"
    return f"{unit['count']} x {unit['name']} from {unit['commit'][:8]}{tree}{since}"
