"""rank1-fig2 at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target("rank1/fig2", {"lemma-converges": "direction only"})
    assert {path.stem for path in folder.glob("*.csv")} == {"table", "summary", "further", "timing", "cost"}
    summary = pd.read_csv(folder / "summary.csv")
    ours = summary[summary.method == "uniform direction"]
    lemma = ours[(ours.sigma_scale == 1) & (ours.rule != "constant")]
    assert len(lemma) == 3  # given with m = 1 and 4, measured
    assert (lemma.share_rising == 0).all()  # the proof has f fall in every step
    assert (ours.share_indefinite > 0.5).any()
    assert (ours[ours.safeguard.eq(True)].share_uphill == 0).all()
