"""Targets run at smoke scale, in this process where they can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from curvlab import runs


@pytest.fixture
def run_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that runs a target's main with overrides and gives its results' root."""
    monkeypatch.chdir(Path(__file__).parents[2])

    def run(main: Callable, config_name: str, *overrides: str) -> Path:
        folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
        main(runs.load_config(config_name, ["preset=smoke", "tracker=none", *folders, *overrides]))
        return tmp_path / "results"

    return run
