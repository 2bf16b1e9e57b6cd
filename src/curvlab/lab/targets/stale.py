"""`make stale`: published results of which a file that they are made by has changed since their commits.

`make verify` says whether a change matters.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from curvlab.lab.runs.record import git
from curvlab.lab.targets.target import ROOT, Target, published

# Of the lab, what makes numbers; the rest keeps, describes and shows them.
_NUMBERS = ("curvlab.lab.data", "curvlab.lab.models")


def print_stale(_: Sequence[str] = ()) -> int:
    """Print every stale result with its units and the files that changed since; return 1 when there is one."""
    from curvlab.lab.runs.record import read_record

    count = 0
    for target, folder in published():
        reasons = stale_parts(target, read_record(folder))
        if reasons:
            count += 1
            print("\n  ".join([folder.as_posix(), *reasons]))
    print(f"{count} stale result{'s' if count > 1 else ''}." if count else "No published result is stale.")
    print("`make verify` computes results again and says what differs.")
    return 1 if count else 0


def stale_parts(target: Target, record: Mapping[str, Any]) -> list[str]:
    """Return a line for the units of each commit, and for the tables, when files changed since it was made.

    Args:
        target: its module, and the classes that the config names, say which files count: `made_by`.
        record: content of run.json.
    """
    files = tuple(path.relative_to(ROOT).as_posix() for path in made_by(target, record.get("config", {})))
    parts: dict[tuple[str, Any], list[str]] = {}
    for part in [*record["units"], record["assembled"]]:
        what = f"{part['count']} x {part['name']}" if "count" in part else "its tables"
        parts.setdefault((str(part["commit"]), part["clean"]), []).append(what)
    found = []
    for (commit, clean), names in parts.items():
        changed = _changed_since(commit, files)
        if changed != ():
            why = "git does not know this commit" if changed is None else _some(changed)
            tree = "" if clean is True else " with changes"
            found.append(f"{', '.join(names)} from {commit[:8]}{tree}: {why}")
    return found


def made_by(target: Target, config: Mapping[str, Any]) -> list[Path]:
    """Return the files of this repository that a target imports, and those of the `_target_`s in its config.

    Imports inside functions count, those under `if TYPE_CHECKING` do not. `from package import name` leads to the
    module that defines the name, by way of the package's `__init__`. Left out: what keeps and shows numbers.
    """
    home, named = target.path, re.findall(r'"_target_": "([\w.]+)"', json.dumps(config))
    waiting = [home, *(home.parent.glob("*.py") if home.name == "__init__.py" else [])]
    waiting += [file for name in named for file in _files_of(*name.rpartition(".")[::2])]
    return _all_behind(waiting)


def behind(code: str) -> list[Path]:
    """Return the same of a piece of code: the files of this repository that it imports."""
    return _all_behind(_imported(ast.parse(code), ROOT / "code.py"))


def _all_behind(waiting: Iterable[Path]) -> list[Path]:
    waiting, found = list(waiting), set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting.extend(_imports(path))
    return sorted(found)


@cache
def _changed_since(commit: str, files: tuple[str, ...]) -> tuple[str, ...] | None:
    changed = git("-C", str(ROOT), "diff", "--name-only", "--no-renames", commit, "--", *files)
    return None if changed is None else tuple(changed.split())


def _some(names: tuple[str, ...], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    return tuple(_imported(_tree(path), path))


def _imported(tree: ast.Module, path: Path) -> Iterator[Path]:
    """Yield the files that a file imports from."""
    for node in _nodes_that_run(tree):
        if isinstance(node, ast.Import):
            yield from (file for alias in node.names for file in _files_of(alias.name, ""))
        elif isinstance(node, ast.ImportFrom):
            base = _base(path, node)
            yield from (file for alias in node.names for file in _files_of(base, alias.name))


def _files_of(base: str, name: str) -> Iterator[Path]:
    """Yield the file that `from base import name` is about; nothing for other people's modules."""
    if base.startswith("curvlab.lab") and not f"{base}.{name}".startswith(_NUMBERS):
        return
    inner = _file_of(f"{base}.{name}") if name else None
    path = inner or _file_of(base)
    if inner is None and path is not None and path.name == "__init__.py":
        for node in _nodes_that_run(_tree(path)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        yield from _files_of(_base(path, node), alias.name)
                        return
    if path is not None:
        yield path


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    folder = {"curvlab": ROOT / "src", "experiments": ROOT}.get(parts[0])
    if folder is None:
        return None
    path = folder.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _base(path: Path, node: ast.ImportFrom) -> str:
    """Return the module that a statement imports from, its dots resolved."""
    if not node.level:
        return node.module or ""
    folder = path.relative_to(ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT).parent.parts
    return ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield node
            yield from _nodes_that_run(node)
