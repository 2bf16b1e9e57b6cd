"""bench-solvers end to end at smoke scale, and its counting against hand counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from experiments.benchmarks.solvers.counting import CountedOperator, Counter, Recorder, pearson
from experiments.benchmarks.solvers.methods import LABELS


def test_trajectories_end_at_the_tolerance(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/solvers")
    table, timing = pd.read_csv(folder / "table.csv"), pd.read_csv(folder / "timing.csv")
    assert "seconds" not in table
    assert set(table.method) == set(LABELS.values())
    summary = pd.read_csv(folder / "summary.csv")
    assert len(summary) == len(LABELS) * 2  # one or five right-hand sides
    krylov = summary[summary.outcome == "converged"]
    assert len(krylov) == 2 * 7
    assert (krylov.residual <= 0.01).all()
    assert (krylov.error_worst < 0.05).all()
    assert (krylov.correlation > 0.99).all()
    five = summary[summary.num_rhs == 5].set_index("method")
    assert five.work["block CG"] < five.work["CG"]
    assert five.work_over_cg["CG"] == 1
    for _, curve in table.groupby(["num_rhs", "method"]):
        assert (np.diff(curve.work) >= 0).all()
    np.testing.assert_array_equal(table.work, timing.work)
    for _, curve in timing.groupby(["num_rhs", "method"]):
        assert (np.diff(curve.seconds) >= 0).all()
    for name in ("figure.png", "figure_seconds.png"):
        assert (folder / name).is_file()


def test_work_is_counted_in_shares_of_the_data() -> None:
    torch.manual_seed(0)
    op = GaussNewtonOperator(nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(8, 3), torch.zeros(8).long()))
    counter = Counter()
    counted = CountedOperator(op, counter)
    vectors = torch.randn(8, 5)
    torch.testing.assert_close(counted @ vectors, op @ vectors)
    assert counter.work == 5
    batch = counted.sample(2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch @ vectors, op.sample(2, torch.Generator().manual_seed(0)) @ vectors)
    assert counter.work == 5 + 5 * 2 / 8
    batch.sample(4) @ vectors
    assert counter.work == pytest.approx(5 + 5 * 2 / 8 + 5 * 4 / 8)


def test_recorder_leaves_out_its_own_time() -> None:
    ticks = iter([0.0, 3.0, 10.0, 12.0, 20.0])
    recorder = Recorder(Counter(), torch.ones(4, 2), torch.eye(4), lambda: next(ticks))
    recorder.start()
    recorder(SimpleNamespace(num_steps=1, x=torch.ones(4, 2) * 1.5))  # at 3, busy until 10
    recorder.record(torch.ones(4, 2))  # at 12
    assert [row["seconds"] for row in recorder.rows] == [3.0, 5.0]
    torch.testing.assert_close(recorder.rows[0]["errors"], torch.full((2,), 0.5))


def test_pearson_is_numpys() -> None:
    left, right = torch.randn(9, 3), torch.randn(9, 3)
    expected = [np.corrcoef(left[:, k], right[:, k])[0, 1] for k in range(3)]
    torch.testing.assert_close(pearson(left, right), torch.tensor(expected, dtype=torch.float32))
