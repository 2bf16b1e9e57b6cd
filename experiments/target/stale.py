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
        reasons = stale_parts(folder)
        if reasons:
            count += 1
            print(f"{folder.as_posix()}")
            for reason in reasons:
                print(f"  {reason}")
    print(f"{count} stale result{'s' if count > 1 else ''}." if count else "No published result is stale.")
    print(f'Results that say "{NOT_RECORDED}" cannot be checked.')
    return 1 if count else 0


def stale_parts(folder: Path) -> list[str]:
    """Return a line for each kind of unit of a result, and for its tables, whose code has changed since."""
    from curvlab.runs.origins import is_stale
    from curvlab.runs.record import NOT_RECORDED, read_record

    record = read_record(folder)
    units = record.get("units", NOT_RECORDED)
    if units == NOT_RECORDED:
        return []
    return [_reason(part) for part in [*units, record["assembled"]] if "roots" in part and is_stale(part)]


def _reason(part: Mapping[str, Any]) -> str:
    from curvlab.runs.fingerprint import source_files

    files = [str(path.relative_to(ROOT)) for path in source_files(part["roots"]) if path.is_relative_to(ROOT)]
    changed = subprocess.run(
        ["git", "diff", "--name-only", str(part["commit"]), "--", *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    names = changed.stdout.split() if changed.returncode == 0 else []
    since = f": {', '.join(names)}" if names else ""
    what = f"{part['count']} x {part['name']}" if "count" in part else "its tables"
    tree = "" if part["clean"] is True else " with changes"
    return f"{what} from {part['commit'][:8]}{tree}{since}"
