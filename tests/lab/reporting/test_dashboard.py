"""What W&B is told to show: rebuilt equal without an account, and nothing of an account in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from curvlab.lab.reporting.dashboard import headline_claims, text
from curvlab.lab.targets.target import ROOT, all_targets, paper_titles


@pytest.mark.parametrize("paper", paper_titles())
def test_what_is_committed_is_what_is_built(paper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install 'curvlab[wandb]'")
    monkeypatch.setenv("HOME", str(tmp_path))  # no account
    for variable in ("WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(variable, raising=False)
    built = text(paper)
    path = ROOT / "results" / paper / "dashboard.json"
    assert path.read_text(encoding="utf-8") == built, "`make dashboard` writes it"
    assert len(built) < 150_000
    grids = [block for block in json.loads(built)["report"]["blocks"] if block["type"] == "panel-grid"]
    targets = [target.make_name for target in all_targets().values() if target.paper_key == paper]
    runs = [runset for grid in grids for runset in grid["metadata"]["runSets"]]
    assert [runset["name"] for runset in runs] == targets
    assert [runset for runset in runs if "project" in runset] == []  # of the report's project, whoever's it is
    assert "entity" not in built


def test_headlines_name_claims_of_the_sheet_or_all_of_a_task() -> None:
    found = headline_claims(all_targets()["lissa/tab1"])
    assert "constant-two" in found
    assert "agreement-*" in headline_claims(all_targets()["lissa/fig1"])
