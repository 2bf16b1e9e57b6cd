"""rank1-fig1 at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from curvlab.lab.target.execution import draw_target
from experiments.rank1.fig1 import TARGET


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target("rank1/fig1", {"converges": "reproduced"})
    assert pd.read_csv(folder / "table.csv").error_of_D.max() < 1e-12  # n = 1: every draw of D is f''
    summary = pd.read_csv(folder / "summary.csv")
    rated = summary[summary["expected rate"].notna()]
    assert len(rated) == 4
    assert (rated["measured rate"] / rated["expected rate"] - 1).abs().max() < 0.05
    drawn = (folder / "figure.png").read_bytes()
    (folder / "figure.png").unlink()
    draw_target(TARGET, folder)
    assert (folder / "figure.png").read_bytes() == drawn  # from the tables alone
