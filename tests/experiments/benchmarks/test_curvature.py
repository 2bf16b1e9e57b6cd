"""bench-curvature end to end at smoke scale; its products and its gauges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch.testing import assert_close

from experiments.benchmarks.curvature.gauges import measure_peak, measure_times
from experiments.benchmarks.curvature.products import build_case, products

CASE = OmegaConf.create(
    {
        "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [6], "activation": "tanh"},
        "input_shape": [5],
        "num_outputs": 3,
        "batch_size": 4,
        "tokens": False,
    }
)


def test_target_tabulates_every_method(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/curvature")
    table = pd.read_csv(folder / "table.csv").set_index(["num_vectors", "method"])
    assert (folder / "figure.png").is_file()
    ours = table.xs("curvlab", level="method")
    assert (ours.status == "done").all()
    assert (ours.milliseconds > 0).all()
    forward, gradient = (table.loc[(1, unit), "milliseconds"] for unit in ("forward", "gradient"))
    row = table.loc[(1, "curvlab")]
    assert_close(row.to_base, row.milliseconds / (2 * forward + gradient), rtol=1e-4, atol=0.0)
    assert_close(row.to_aim, row.to_base / 1.15, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("count", [1, 3])
def test_both_libraries_multiply_the_same_matrix(count: int) -> None:
    pytest.importorskip("curvlinops")
    ours, theirs = (
        products(method, build_case(CASE, torch.Generator().manual_seed(0), torch.device("cpu")), count)()
        for method in ("curvlab", "curvlinops")
    )
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_methods_take_turns() -> None:
    calls: list[str] = []
    methods = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = measure_times(methods, num_rounds=3, device=torch.device("cpu"))
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in times.values()] == [3, 3]


def test_peak_memory_sees_what_is_held_at_once() -> None:
    peak = measure_peak(lambda: torch.ones(2**24), torch.device("cpu"))  # 64 MiB
    if peak != peak:
        pytest.skip("this system does not tell")
    assert 60 < peak < 100
