"""Targets run at smoke scale, in this process where they can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.target import load_config, run_target
from experiments.target.discovery import all_targets


@pytest.fixture
def run_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that runs a target, e.g. "ngd/fig6", with overrides, and gives its result folder."""
    monkeypatch.chdir(Path(__file__).parents[2])

    def run(key: str, *overrides: str) -> Path:
        target = all_targets()[key]
        folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
        cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders, *overrides])
        return run_target(target, cfg)

    return run
