"""Every target computes, judges and draws at smoke scale, end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvlab.lab import Computed, all_targets
from curvlab.lab.reporting import load_claims

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
