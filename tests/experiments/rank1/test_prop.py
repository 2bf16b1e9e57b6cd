"""rank1-prop at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target(
        "rank1/prop",
        {
            "equality": "not reproduced",
            "equality-isotropic": "reproduced",
            "largest-eigenvalue": "not reproduced",
            "not-psd": "reproduced",
            "sigma-bound": "reproduced",
        },
    )
    summary = pd.read_csv(folder / "summary.csv")
    assert summary.z.abs().max() < 4  # 400 draws of 28 settings
    assert (summary.measured > 0).all()


def test_a_second_run_gives_the_same_table(run_smoke: Callable[..., Path]) -> None:
    settings = ["spectra=[isotropic,power]", "sizes=[2]", "num_draws=40"]
    first = (run_smoke("rank1/prop", *settings) / "table.csv").read_bytes()
    assert (run_smoke("rank1/prop", *settings, "force=true") / "table.csv").read_bytes() == first
