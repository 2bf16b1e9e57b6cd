"""rank1-prop at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from curvlab.lab import Run, load_config
from experiments.rank1.prop import TARGET
from experiments.rank1.prop.compute import compute


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target(
        "rank1/prop",
        {
            "equality": "refuted",
            "equality-isotropic": "reproduced",
            "largest-eigenvalue": "refuted",
            "not-psd": "reproduced",
            "sigma-bound": "reproduced",
        },
    )
    summary = pd.read_csv(folder / "summary.csv")
    assert summary.z.abs().max() < 4  # 400 draws of 28 settings
    assert (summary.measured > 0).all()


def test_a_second_computation_gives_the_same_table(tmp_path: Path) -> None:
    settings = ["preset=smoke", "tracker=none", "progress=false", "force=true", "spectra=[power]", "num_draws=40"]
    cfg = load_config(TARGET, [*settings, f"results.root={tmp_path}", f"store.root={tmp_path / 'store'}"])
    tables = [compute(Run(cfg, key=TARGET.key, title=TARGET.title), cfg)["table"] for _ in range(2)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
