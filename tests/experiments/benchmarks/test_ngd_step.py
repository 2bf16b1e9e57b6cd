"""bench-ngd-step end to end at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.benchmarks.ngd_step.compute import OPTIMIZERS
from experiments.benchmarks.ngd_step.parts import PARTS, Recorder, part_of


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
    parts = pd.read_csv(folder / "parts.csv").set_index("part")
    assert parts.index.tolist() == [*PARTS, "all calls", "least", "ngd", "adam"]
    assert parts.calls["all calls"] == pytest.approx(parts.calls[list(PARTS)].sum(), rel=1e-4)
    assert parts.milliseconds["all calls"] == pytest.approx(parts.milliseconds[list(PARTS)].sum(), rel=1e-4)
    assert 0 < parts.milliseconds["least"] <= parts.milliseconds["all calls"]
    whole = (parts.calling + parts.arithmetic).dropna()
    assert whole.tolist() == pytest.approx(parts.milliseconds[whole.index].tolist(), rel=1e-4)
    assert (folder / "parts.png").is_file()


def test_calls_are_recorded_and_told_apart() -> None:
    x = torch.eye(3)
    with Recorder() as recorder:
        y = torch.mm(x.T, x)
        y.add_(1)
        torch.bmm(x[None].double(), x[None].double())
        torch.linalg.eigh(y)
    kinds = [part_of(call) for call in recorder.calls]
    assert kinds.count("products") == kinds.count("double products") == kinds.count("eigendecompositions") == 1
    assert kinds.count("element by element") == 3  # the sum, and two copies in double precision
    assert kinds.count("views") == 3
