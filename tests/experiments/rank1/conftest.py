"""A target of the rank-one slides at smoke scale, with what is checked of all five."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvlab.lab.reporting import load_claims


@pytest.fixture
def checked_target(run_smoke: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that runs a target, checks its files and certain verdicts, and gives its result folder."""

    def run(key: str, verdicts: Mapping[str, str]) -> Path:
        folder = run_smoke(key)
        for name in ("table.csv", "summary.csv", "run.json", "claims.json"):
            assert (folder / name).is_file()
        assert verdicts.items() <= {result.claim.id: result.verdict for result in load_claims(folder)}.items()
        assert all(np.asarray(Image.open(path).convert("L")).std() > 10 for path in folder.glob("figure*.png"))
        assert (folder / "figure.png").is_file()
        return folder

    return run
