"""`python -m experiments changes COMMIT`: what changed since, as an entry of same_numbers.yaml to fill in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import yaml

from curvlab.lab.target.discovery import ROOT


def print_changes(arguments: Sequence[str]) -> int:
    """Print an entry for each module whose code is another than at a commit; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m experiments changes COMMIT", file=sys.stderr)
        return 2
    try:
        modules, new = changes_since(arguments[0]), added_since(arguments[0])
    except subprocess.CalledProcessError as error:
        print(f"error: git knows no commit {arguments[0]!r}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    if not modules:
        print("No module has changed.")
        return 0
    today = datetime.now(UTC).date().isoformat()
    print(f"- date: {today}\n  why:\n  checked:\n  new: [{', '.join(new)}]\n  modules:")
    for name, of in modules.items():
        fields = yaml.safe_dump(of, default_flow_style=True, sort_keys=False, width=10_000).strip()
        print(f"    {name}: {fields}")
    return 0


def changes_since(commit: str) -> dict[str, dict[str, Any]]:
    """Return hashes, and imports added and dropped, of each module whose code is another than at the commit."""
    from curvlab.lab.runs.fingerprint import code_and_imports

    modules = {}
    for module, name in _modules(commit, "M"):
        before, imported_before = code_and_imports(module, _git("show", f"{commit}:{name}"))
        after, imported = code_and_imports(module)
        if before == after:
            continue
        of: dict[str, Any] = {"before": before, "after": after}
        of |= {"adds": sorted(imported - imported_before)} if imported - imported_before else {}
        of |= {"drops": sorted(imported_before - imported)} if imported_before - imported else {}
        modules[module] = of
    return modules


def added_since(commit: str) -> list[str]:
    """Return the modules that there were not at the commit."""
    return [module for module, _ in _modules(commit, "A")]


def _modules(commit: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield name and file of the modules that were modified (M) or added (A) and that fingerprints take in."""
    from curvlab.lab.runs.fingerprint import reachable_code

    found = _git(
        "diff", "--name-only", "--no-renames", f"--diff-filter={kind}", commit, "--", "src", "experiments"
    )
    for name in found.split():
        module = ".".join(PurePosixPath(name.removeprefix("src/")).with_suffix("").parts)
        if name.endswith(".py") and not name.endswith("__init__.py") and module in reachable_code([module]):
            yield module, name


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True).stdout
