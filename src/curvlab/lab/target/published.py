"""Result folders, found by targets' names or by their paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from curvlab.lab.target.declaration import Target
from curvlab.lab.target.discovery import all_targets, named_targets

Found = list[tuple[Target, Path]]


def result_folders(names: Sequence[str], root: str | Path = "results") -> Found:
    """Return targets with their result folders, of every preset and variation that was run.

    Args:
        names: of targets or of groups of them, or paths of result folders.
        root: of the results.
    """
    targets, found = all_targets(), []
    for name in names:
        key = "/".join(Path(name).resolve().parts[-3:-1])
        if (Path(name) / "run.json").is_file() and key in targets:
            found.append((targets[key], Path(name)))
            continue
        for target in named_targets([name]):
            records = sorted((Path(root) / target.key).glob("*/run.json"))
            found += [(target, record.parent) for record in records]
    return found


def published(root: str | Path = "results") -> Found:
    """Return all published results: no smoke, and no variation of a user's."""
    found = result_folders(list(all_targets()), root)
    return [(target, folder) for target, folder in found if folder.name != "smoke" and "+" not in folder.name]
