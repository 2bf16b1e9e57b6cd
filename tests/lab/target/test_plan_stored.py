"""plan=true with a store: which units are there, and nothing computed, written or touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from curvlab.lab.target import load_config
from curvlab.lab.target.discovery import all_targets
from curvlab.lab.target.plan.stored import stored_units

TASKS = ["mlp_8_digits_200", "opt_1_16_documentation_120"]


def lines(root: Path, *overrides: str) -> list[str]:
    folders = [f"results.root={root / 'nowhere'}", f"store.root={root / 'store'}"]
    target = all_targets()["lissa/tab1"]
    return list(stored_units(target, load_config(target, ["preset=smoke", *folders, *overrides])))


def state(root: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_units_are_found_task_by_task_until_one_is_not_there(run_smoke) -> None:
    root: Path = run_smoke("lissa/tab1").parents[3]
    before = state(root)
    found = lines(root)
    assert [line.partition(":")[0] for line in found] == [f"store, {task}" for task in TASKS]
    assert all(line.endswith(": all") for line in found)
    assert "store, mlp_8_digits_200: 7 units stored, " in found[0]
    changed = lines(root, "sketch.size=90", "task=mlp_8_digits_200")
    assert len(changed) == 1
    assert "4 units stored" in changed[0]
    assert "first that is not: dense sketch of mlp-8-digits-200, d = 90" in changed[0]
    assert state(root) == before
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize("override", ["preset=paper", "force=true"])
def test_nothing_is_looked_for_where_it_would_load_large_models_or_not_be_used(tmp_path: Path, override) -> None:
    (tmp_path / "store").mkdir()
    assert lines(tmp_path, override) == []


def test_nothing_is_looked_for_without_a_store_and_none_is_found_in_an_empty_one(tmp_path: Path) -> None:
    assert lines(tmp_path) == []
    (tmp_path / "store").mkdir()
    assert "none stored; first that is not: training mlp-8-digits-200" in lines(tmp_path)[0]
    assert state(tmp_path) == {}
