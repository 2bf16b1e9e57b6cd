"""bench-ngd-step end to end at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from experiments.benchmarks.ngd_step.compute import OPTIMIZERS


def test_times_every_optimizer_in_every_repeat(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/ngd_step")
    for name in ("figure.png", "run.json"):
        assert (folder / name).is_file()
    table = pd.read_csv(folder / "table.csv")
    assert table.groupby("optimizer").repeat.nunique().to_dict() == dict.fromkeys(OPTIMIZERS, 2)
    assert set(table.parameters) == {65 * 64 + 65 * 64 + 65 * 10}
    assert (table.milliseconds > 0).all()
    summary = pd.read_csv(folder / "summary.csv")
    assert summary[summary.optimizer == "adam"].to_adam.tolist() == [1.0]
    ranks = pd.read_csv(folder / "ranks.csv")
    assert ranks.groupby("rank").optimizer.apply(set).to_dict() == {4: set(OPTIMIZERS), 8: set(OPTIMIZERS)}
    assert (folder / "ranks.png").is_file()
