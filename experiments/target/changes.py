"""`python -m experiments changes COMMIT`: what changed since, as entries of same_numbers.yaml to fill in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import yaml

from experiments.target.discovery import ROOT


def print_changes(arguments: Sequence[str]) -> int:
    """Print an entry for each module whose code is another than at a commit; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m experiments changes COMMIT", file=sys.stderr)
        return 2
    try:
        entries = changes_since(arguments[0])
    except subprocess.CalledProcessError as error:
        print(f"error: git knows no commit {arguments[0]!r}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    print(yaml.safe_dump(entries, sort_keys=False, width=110) if entries else "No module has changed.")
    return 0


def changes_since(commit: str) -> list[dict[str, Any]]:
    """Return module, date, hashes, and the imports added and dropped, of each module that a result may rest on."""
    from curvlab.runs.fingerprint import code_and_imports, reachable_code

    entries = []
    # Changed, not added: what is new is reached by an import that is new.
    for name in _git("diff", "--name-only", "--diff-filter=M", commit, "--", "src", "experiments").split():
        if not name.endswith(".py") or name.endswith("__init__.py"):
            continue
        module = ".".join(PurePosixPath(name.removeprefix("src/")).with_suffix("").parts)
        if module not in reachable_code([module]):  # bookkeeping
            continue
        before, imported_before = code_and_imports(module, _git("show", f"{commit}:{name}"))
        after, imported = code_and_imports(module)
        if before == after:
            continue
        entry: dict[str, Any] = {"module": module, "date": datetime.now(UTC).date().isoformat()}
        entry |= {"before": before, "after": after}
        entry |= {"adds": sorted(imported - imported_before)} if imported - imported_before else {}
        entry |= {"drops": sorted(imported_before - imported)} if imported_before - imported else {}
        entries.append(entry | {"why": "", "checked": ""})
    return entries


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True).stdout
