"""Rules of the experiments: papers stand alone, what is published names its code, ours is read and never typed."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from curvlab.lab import all_targets
from curvlab.lab.runs.record import NOT_RECORDED
from curvlab.lab.targets.target import published

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
SHARED = {"papers", "shared", "target"}  # folders that anyone may import


@cache
def trees(folder: Path = EXPERIMENTS) -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(EXPERIMENTS), ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))]


def imported_folders(tree: ast.Module) -> set[str]:
    """Return the folders of experiments that a module imports from, imports inside functions included."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[1] for name in names if name.startswith("experiments.")}


def calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def test_no_paper_imports_another() -> None:
    found = {}
    for path, tree in trees():
        others = imported_folders(tree) - SHARED - {path.parts[0]}
        if path.parts[0] != "target" and others:
            found[path.as_posix()] = others
    assert found == {}


def test_what_is_shared_imports_no_paper() -> None:
    for folder in SHARED:
        for path, tree in trees(EXPERIMENTS / folder):
            assert imported_folders(tree) <= SHARED, path


def test_every_unit_of_work_has_a_version() -> None:
    without = [
        f"{path}:{call.lineno}"
        for path, tree in trees()
        for call in calls(tree, "unit")
        if "version" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []


def test_ours_is_never_typed() -> None:
    typed = []
    for path, tree in trees():
        if path.parts[0] == "target":
            continue  # it reads ours from the config and the tables
        constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "ours"]
        typed += [f"{path}:{node.lineno}" for node in constants]
        typed += [
            f"{path}:{call.lineno}"
            for call in calls(tree, "note")
            if {keyword.arg for keyword in call.keywords} & {"scale", "settings"}
        ]
    assert typed == []


def test_the_checks_above_find_what_they_look_for() -> None:
    tree = ast.parse("from experiments.ngd.fig1 import x\nrun.unit('a', {}, f)\nrun.note(scale={'ours': 1})")
    assert imported_folders(tree) == {"ngd"}
    assert len(list(calls(tree, "unit"))) == len(list(calls(tree, "note"))) == 1


def test_published_results_name_the_commits_of_their_units() -> None:
    for _, folder in published(ROOT / "results"):
        record = json.loads((folder / "run.json").read_text())
        units = record["units"]
        where = folder.relative_to(ROOT).as_posix()
        assert units == NOT_RECORDED or isinstance(units, list), where
        assert record["assembled"]["commit"], where
        if units != NOT_RECORDED:  # results from before units kept their origin say just that
            for unit in units:
                assert {"name", "version", "function", "commit", "clean", "count"} <= set(unit), where
            assert record["judged"]["commit"], where
            assert record["drawn"]["commit"], where


def test_every_result_belongs_to_a_target() -> None:
    found = {"/".join(path.parts[-4:-2]) for path in (ROOT / "results").glob("*/*/*/run.json")}
    assert found <= set(all_targets())


def test_no_committed_file_is_large() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in (ROOT / "results").rglob("*.*")}
    assert [name for name, size in sizes.items() if size > 2_000_000] == []
