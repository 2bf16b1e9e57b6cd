"""Every target computes, judges and draws at smoke scale, end to end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvlab.lab import Computed, all_targets
from curvlab.lab.claims import load_claims
from curvlab.lab.reporting.dashboard import named_keys
from curvlab.lab.targets.execution import curves_of, numbers_of

# Targets that are still a folder run at smoke scale in tests of their own.
TARGETS = {key: target for key, target in all_targets().items() if target.path.suffix == ".py"
           and target.path.stem != "__init__"}  # fmt: skip


@pytest.mark.parametrize("key", TARGETS)
def test_target_at_smoke_scale(smoke_result: Callable[[str], Path], key: str) -> None:
    folder = smoke_result(key)
    assert (folder / "run.json").is_file()
    tables = Computed.of(folder)
    assert {name for name, table in tables.items() if len(table) == 0} == set()
    assert len(tables)
    if TARGETS[key].claims_file is not None:
        assert load_claims(folder)  # of every claim of the sheet, or the run would have failed
    figures = list(folder.glob("*.png"))
    assert folder / "figure.png" in figures
    for path in figures:
        assert np.asarray(Image.open(path).convert("L")).std() > 10, f"{path.name} is empty"
    # What its panels in W&B name is among what a tracker is told.
    pytest.importorskip("wandb_workspaces")
    drawn = list(curves_of(TARGETS[key], tables))
    told = {*numbers_of(folder), "progress/units", "progress/seconds", "figure"}
    told |= {str(name) for curves in drawn for name in (curves.index.name, *curves)}
    keys, patterns = named_keys(TARGETS[key])
    assert set(keys) - told == set()
    assert [pattern for pattern in patterns if not any(re.search(pattern, each) for each in told)] == []
