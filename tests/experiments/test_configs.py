"""Every target composes in every preset, and knows its settings beside the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.lab.claims import load_claim_sheet
from curvlab.lab.targets.settings import MISSING, ours

ROOT = Path(__file__).parents[2]
PRESETS = ("embedded", "laptop", "paper")  # smoke is composed, and run, by test_smoke.py
TARGETS = all_targets()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("key", TARGETS)
def test_target_composes(key: str, preset: str) -> None:
    target = TARGETS[key]
    cfg = load_config(target, [f"preset={preset}"])
    assert cfg.preset == preset
    kept = {name for name, own in (cfg.get("tasks") or {}).items() if own is not None}
    assert set(task_settings(cfg)) == kept
    # An override of a task that the defaults do not list makes one up, and its own then runs unchanged.
    assert [name for name in kept if "data" not in cfg.tasks[name]] == []
    found = ours([name for name in target.paper_settings if ".csv:" not in name], cfg, {})
    assert [name for name, value in found.items() if value == MISSING] == []


@pytest.mark.parametrize("key", TARGETS)
def test_target_has_its_rooms(key: str) -> None:
    target = TARGETS[key]
    assert target.description.splitlines()[2].startswith(f"make {target.make_name} "), (
        "the docstring shows how to run it"
    )
    assert [callable(target.load(room)) for room in ("compute", "draw")] == [True, True]
    entries = {} if target.claims_file is None else load_claim_sheet(target.claims_file).entries
    if any("value" not in entry for entry in entries.values()):
        assert callable(target.load("judge"))
    assert set(target.after) <= set(TARGETS)


@pytest.mark.parametrize("key", TARGETS)
def test_config_opens_with_its_make_command(key: str) -> None:
    lines = (ROOT / "conf" / f"{TARGETS[key].config_name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# make {TARGETS[key].make_name} ")


def test_every_folder_with_a_target_config_is_of_a_target() -> None:
    found = {path.parent.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").glob("*/*/target.yaml")}
    assert found <= set(TARGETS)
