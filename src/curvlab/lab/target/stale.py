"""`make stale`: published results whose numbers come from code that has changed since."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from curvlab.lab.target.discovery import ROOT
from curvlab.lab.target.published import published

SAME_NUMBERS = Path(__file__).with_name("same_numbers.yaml")


def print_stale() -> int:
    """Print every stale result with the units and the files that changed; return 1 when there is one."""
    from curvlab.lab.runs.record import NOT_RECORDED

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
    from curvlab.lab.runs.record import NOT_RECORDED, read_record

    record = read_record(folder)
    units = record.get("units", NOT_RECORDED)
    if units == NOT_RECORDED:
        return []
    return [_reason(part) for part in [*units, record["assembled"]] if "roots" in part and _is_stale(part)]


def current_fingerprints(roots: Iterable[str], changes: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the fingerprints of code that makes today's numbers: today's, and those before `changes`.

    Args:
        roots: modules to start from, see `curvlab.lab.runs.fingerprint`.
        changes: the newest last, each with `modules`: by name the hash `before` and `after`, and the modules whose
            import the change `adds` and `drops`; and with `new`, modules that it adds; see same_numbers.yaml.
    """
    from curvlab.lab.runs.fingerprint import code_and_imports, fingerprint_of, reachable_code

    hashes: dict[str, str] = {}
    imports: dict[str, set[str]] = {}
    new: set[str] = set()
    found = {fingerprint_of(reachable_code(roots))}
    for change in reversed(changes):
        new |= set(change.get("new", ()))
        # Whether reached today or not: once an import is undone, they may be reached again.
        for name, of in change["modules"].items():
            own, imported = code_and_imports(name)
            if hashes.get(name, own) == of["after"]:
                hashes[name] = of["before"]
                kept = imports.get(name, set(imported)) - set(of.get("adds", ()))
                imports[name] = kept | set(of.get("drops", ()))
        found.add(fingerprint_of(_earlier(roots, imports, new, hashes)))
    return found


def _earlier(
    roots: Iterable[str], imports: Mapping[str, set[str]], new: set[str], hashes: Mapping[str, str]
) -> dict[str, str]:
    """Return the hash of each module reached when `imports` and `hashes` held, and `new` were not there."""
    from curvlab.lab.runs.fingerprint import reachable_code

    code = reachable_code(roots, imports, new)
    return code | {name: earlier for name, earlier in hashes.items() if name in code}


def same_numbers() -> list[dict[str, Any]]:
    """Return the changes of code that make no published number another."""
    changes: list[dict[str, Any]] = yaml.safe_load(SAME_NUMBERS.read_text(encoding="utf-8")) or []
    return changes


def _is_stale(part: Mapping[str, Any]) -> bool:
    return part["fingerprint"] not in _current(tuple(part["roots"]))


@cache
def _current(roots: tuple[str, ...]) -> set[str]:
    return current_fingerprints(roots, same_numbers())


def _reason(part: Mapping[str, Any]) -> str:
    from curvlab.lab.runs.fingerprint import source_files

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
