"""bench-preconditioners end to end at smoke scale, and its claims on made-up tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.lab import ClaimResult, Computed
from experiments.benchmarks.preconditioners.estimates import BATCH_TRACE, SQUARE, TRACE, batch_trace_deviation
from experiments.benchmarks.preconditioners.sampling import WAYS, shares


def test_smoke_run(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/preconditioners")
    table, timing = pd.read_csv(folder / "table.csv"), pd.read_csv(folder / "timing.csv")
    assert "seconds" not in table
    assert (timing.seconds > 0).all()
    assert (table.residual <= 1e-3).all()
    for _, curve in table.groupby("preconditioner"):
        assert (np.diff(curve.products) > 0).all()  # residuals of 0.1, 0.01, 0.001
    last = table[table.target == 1e-3].set_index("preconditioner").products
    assert last["400 rows, by traces"] < last["none"] < last["CG"]
    lissa, steps = pd.read_csv(folder / "lissa.csv"), pd.read_csv(folder / "lissa_steps.csv")
    assert lissa.sampling.tolist() == list(WAYS.values())
    by_traces = lissa.set_index("sampling").loc[WAYS["traces"]]
    assert by_traces.certified <= 1.01
    assert by_traces.constant <= by_traces.certified
    assert by_traces.error < 1.5 * by_traces.exact_rate
    assert set(steps.sampling) == set(WAYS.values())
    assert (folder / "figure.png").is_file()
    estimates = pd.read_csv(folder / "estimates.csv")
    batches = estimates[estimates.quantity == BATCH_TRACE].groupby("sampling")
    measured, expected = batches.value.std(), batches.exact_sd.first()
    assert expected[WAYS["traces"]] < 0.02 * expected[WAYS["uniform"]]  # only its floor keeps it from 0
    assert 0.5 < measured[WAYS["uniform"]] / expected[WAYS["uniform"]] < 2


def test_deviation_of_a_batchs_trace_by_formula_and_by_enumeration() -> None:
    traces = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    # tr(G_i) / (4 q_i) = 2.5, 2.5, 2.5, 6.25 with a mean of 4: 0.6 x 1.5² + 0.4 x 2.25² = 3.375
    assert batch_trace_deviation(traces, q) == pytest.approx(math.sqrt(3.375), rel=1e-12)
    assert batch_trace_deviation(traces, traces / traces.sum()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("scale", "verdict"), [(0.2, "reproduced"), (0.75, "direction only"), (2.0, "not reproduced")]
)
def test_estimates_are_judged_by_their_spread(
    tables: dict[str, pd.DataFrame],
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
    scale: float,
    verdict: str,
) -> None:
    draws = np.random.default_rng(0).normal(size=200)
    rows = [
        {"task": "a", "sampling": WAYS[way], "quantity": quantity, "trace": 10.0, "exact_sd": 1.0, "value": value}
        for way, spread in (("uniform", 1.0), ("traces", scale))
        for quantity in (BATCH_TRACE, TRACE, SQUARE)
        for value in 10 + spread * draws
    ]
    results = judged(
        "benchmarks/preconditioners", computed_of(tables | {"estimates": pd.DataFrame(rows)}, {"seed": 0})
    )
    found = {result.claim.id: result for result in results}
    for name in ("trace-estimates-a", "sketch-estimates-a"):
        assert found[name].value == pytest.approx(scale)
        assert found[name].verdict == verdict


def test_shares_of_the_trace() -> None:
    traces = torch.tensor([1.0] * 38 + [31.0, 31.0])
    assert shares(traces) == {"top_1_20": 0.62, "top_1_6": pytest.approx(0.66)}


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    labels = ["none", "Nyström 100", "400 rows", "900 rows", "CG"]
    rows = [
        {
            "task": task,
            "preconditioner": label,
            "target": target,
            "products": p,
            "residual": 1e-4,
            "fitted": fitted,
        }
        for task, fitted in (("a", True), ("early", False))
        for target in (0.1, 0.01)
        for label, p in zip(labels, (40, 30, 12, 8, 120), strict=True)
    ]
    table = pd.DataFrame(rows)
    seconds = dict(zip(labels, (4.0, 5.0, 1.0, 3.0, 9.0), strict=True))
    timing = table[["task", "preconditioner", "target"]].assign(seconds=table.preconditioner.map(seconds))
    lissa = pd.DataFrame(
        {
            "task": "a",
            "sampling": list(WAYS.values()),
            "outcome": ["diverges at step 9", "all 50 steps", "all 50 steps"],
            "constant": [7.0, 0.8, 1.2],
            "certified": [30.0, 1.0, 2.5],
            "error": [math.inf, 0.15, 0.2],
            "exact_rate": [0.9, 0.14, 0.14],
            "batch_size": 28,
            "num_steps": 50,
        }
    )
    return {"table": table, "timing": timing, "lissa": lissa}


def test_claims_are_judged_on_fitted_tasks(
    tables: dict[str, pd.DataFrame],
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
) -> None:
    results = judged("benchmarks/preconditioners", computed_of(tables, {"seed": 0}))
    values = {result.claim.id: result.value for result in results}
    assert len(results) == 7
    older = [result for result in results if result.claim.id.endswith("estimates-a")]
    assert [result.verdict for result in older] == ["out of reach"] * 2  # these tables have no estimates
    results = [result for result in results if result not in older]
    peer = next(result for result in results if result.claim.id == "peer-a")
    assert peer.verdict == "out of reach"  # it has not run
    results.remove(peer)
    assert values["products-a"] == 8
    assert values["seconds-a"] == 0.25
    assert values["certificate-a"] == 1.0
    assert values["importance-a"] == pytest.approx(0.15 / 0.14)
    assert {result.verdict for result in results} == {"reproduced"}


def test_claims_can_fail(
    tables: dict[str, pd.DataFrame],
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
) -> None:
    tables["table"]["products"] *= 2
    tables["timing"].loc[tables["timing"].preconditioner == "none", "seconds"] = 0.5
    tables["lissa"].loc[0, "outcome"] = "all 50 steps"
    tables["lissa"].loc[1, "certified"] = 1.2
    results = judged("benchmarks/preconditioners", computed_of(tables, {"seed": 0}))
    verdicts = [result.verdict for result in results if not result.claim.id.endswith("estimates-a")]
    assert verdicts == ["not reproduced", "not reproduced", "out of reach", "not reproduced", "out of reach"]


@pytest.mark.parametrize(("seconds", "verdict"), [(12.0, "reproduced"), (2.0, "direction only")])
def test_the_peer_is_judged_where_it_has_run(
    tables: dict[str, pd.DataFrame],
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
    seconds: float,
    verdict: str,
) -> None:
    for name in ("table", "timing"):
        own = tables[name]
        peer = own[own.preconditioner == "CG"].assign(preconditioner="curvlinops CG")
        tables[name] = pd.concat([own, peer.assign(**({"seconds": seconds} if name == "timing" else {}))])
        tables[name] = tables[name].reset_index(drop=True)
    results = judged("benchmarks/preconditioners", computed_of(tables, {"seed": 0}))
    (found,) = (result for result in results if result.claim.id == "peer-a")
    assert found.value == pytest.approx(1.0 / seconds)
    assert found.verdict == verdict
