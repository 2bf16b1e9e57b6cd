"""bench-attribution end to end at smoke scale, its claims on made-up tables, and what peers are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.reporting import ClaimResult, load_claims
from experiments.benchmarks.attribution.compute import OTHER, SAME
from experiments.benchmarks.attribution.methods import (
    COSINE,
    DOT,
    EKFAC,
    FILTER,
    INFLUENCE,
    RUN_DAMPING,
    SEGMENTS,
    UNROLLED,
    UNROLLED_ORDERS,
)
from experiments.benchmarks.attribution.which_score import BY_LDS, BY_PAPER, which_score
from experiments.benchmarks.influence_peers.worker import TrainedNetwork
from experiments.target import Computed

OURS = {DOT, COSINE, INFLUENCE, RUN_DAMPING, FILTER, EKFAC, SEGMENTS, UNROLLED, UNROLLED_ORDERS}


def test_every_method_is_judged_by_retraining(
    run_smoke: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CURVLAB_PEERS_PYTHON", raising=False)
    folder = run_smoke("benchmarks/attribution")
    table, queries = (pd.read_csv(folder / f"{name}.csv") for name in ("table", "queries"))
    done = table[table.status == "done"]
    assert set(done.method) == OURS
    assert set(table[table.status == "not installed"].method) == {"kronfluence EK-FAC", "dattri EK-FAC", "TRAK"}
    assert done.groupby("method").size()[[INFLUENCE, EKFAC, FILTER]].tolist() == [2, 2, 1]
    for prefix in ("lds", "lds_other"):
        assert (done[f"{prefix}_low"] <= done[prefix]).all()
        assert (done[prefix] <= done[f"{prefix}_high"]).all()
    # Twelve halves of a short training: all methods see what helps, and the exact derivative sees most.
    best = done.groupby("method").lds.max()
    assert best.min() > 0.3
    assert best.idxmax() == UNROLLED
    assert best[UNROLLED] > 0.85
    # Without its top 5 % a test loss rises, whoever ranks; only the best damping of a method is tried.
    removed = done[done.removal_5.notna()]
    assert sorted(removed.method) == sorted(OURS)
    assert (removed.removal_5 > 0.1).all()
    means = queries.fillna({"damping": 0}).groupby(["method", "damping", "orders"]).lds.mean()
    for row in done.fillna({"damping": 0}).itertuples():
        assert means[row.method, row.damping, SAME] == pytest.approx(row.lds, abs=1e-5)
        assert means[row.method, row.damping, OTHER] == pytest.approx(row.lds_other, abs=1e-5)
    timing = pd.read_csv(folder / "timing.csv")
    assert set(timing.method) == OURS | {"one training", "12 halves together"}
    assert timing.set_index("method").trainings["one training"] == 1
    assert (folder / "figure.png").is_file()
    answer = pd.read_csv(folder / "which_score.csv")
    assert answer.groupby("question").size().tolist() == [len(OURS)] * 3  # LDS twice, one removal
    lds = answer[answer.question.str.endswith("in the same order of batches")]
    assert lds.score.iloc[0] == UNROLLED
    assert lds.agreement.is_monotonic_decreasing
    assert len(load_claims(folder)) == 5


def made_up(lds: dict[tuple[str, float, str], float]) -> pd.DataFrame:
    spread = np.linspace(-0.005, 0.005, 20)
    return pd.DataFrame(
        [
            {"task": "net", "method": method, "damping": damping, "orders": orders, "query": query, "lds": value}
            for (method, damping, orders), mean in lds.items()
            for query, value in enumerate(mean + spread)
        ]
    )


def verdicts(results: list[ClaimResult]) -> dict[str, str]:
    return {result.claim.id.removesuffix("-net"): result.verdict for result in results}


def test_claims_compare_best_dampings(
    computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]
) -> None:
    none = float("nan")
    lds = {
        (INFLUENCE, 0.1, SAME): 0.5,
        (INFLUENCE, 0.01, SAME): 0.8,
        (RUN_DAMPING, none, SAME): 0.7,
        (FILTER, none, SAME): 0.78,
        (EKFAC, 0.1, SAME): 0.6,
        (EKFAC, 0.01, SAME): 0.65,
        ("kronfluence EK-FAC", 0.01, SAME): 0.79,
        (UNROLLED, none, SAME): 0.95,
    }
    results = judged("benchmarks/attribution", computed_of({"queries": made_up(lds)}, {"seed": 0}))
    assert verdicts(results) == {
        "unrolled": "reproduced",
        "filter-needs-no-tuning": "reproduced",
        "damping-needs-no-tuning": "not reproduced",
        "filter-above-ekfac": "not reproduced",
        "unrolled-above-filter": "out of reach",
    }
    above = next(result for result in results if result.claim.id.startswith("filter-above-ekfac"))
    assert above.value == pytest.approx(-0.01)
    assert "The best of them is kronfluence EK-FAC, 0.79" in above.explanation
    other = {(UNROLLED, none, OTHER): 0.8, (FILTER, none, OTHER): 0.7}
    results = judged("benchmarks/attribution", computed_of({"queries": made_up(lds | other)}, {"seed": 0}))
    assert verdicts(results)["unrolled-above-filter"] == "reproduced"


def test_which_score_counts_the_search_for_a_damping() -> None:
    table = pd.DataFrame(
        [
            {"method": INFLUENCE, "damping": 0.001, "lds": 0.5, "removal_1": None},
            {"method": INFLUENCE, "damping": 0.1, "lds": 0.8, "removal_1": 0.3},
            {"method": FILTER, "damping": None, "lds": 0.78, "removal_1": 0.4},
        ]
    )
    for name in ("lds", "removal_1"):
        table[f"{name}_low"], table[f"{name}_high"] = table[name] - 0.05, table[name] + 0.05
    trainings = {"one training": 1.0, "100 halves together": 10.0, FILTER: 3.0}
    timing = [{"method": method, "damping": None, "trainings": cost} for method, cost in trainings.items()]
    timing += [{"method": INFLUENCE, "damping": damping, "trainings": 2.0} for damping in (0.001, 0.1)]
    found = which_score(table.assign(task="net", status="done"), pd.DataFrame(timing).assign(task="net"), 0.001)
    lds = found[found.question.str.startswith("what retraining")].set_index("score")
    assert lds.index.tolist() == [f"{INFLUENCE}, {BY_LDS}", FILTER, f"{INFLUENCE}, {BY_PAPER}"]
    assert lds.trainings.tolist() == [14.0, 3.0, 2.0]
    assert lds["as good as the best"].tolist() == [True, True, False]
    removal = found[found.question.str.startswith("whose removal")]
    assert removal.score.tolist() == [FILTER, f"{INFLUENCE}, {BY_LDS}"]


@pytest.mark.parametrize(("activation", "module"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
def test_peers_get_the_network_with_its_activation(activation: str, module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), module(), nn.Linear(4, 3))
    inputs = torch.randn(6, 5)
    stored = {
        "sizes": [5, 4, 3],
        "activation": activation,
        "parameters": [parameter.detach() for parameter in model.parameters()],
        **{name: inputs for name in ("train_inputs", "test_inputs")},
        **{name: torch.zeros(6).long() for name in ("train_targets", "test_targets")},
        "damping": 0.1,
    }
    torch.testing.assert_close(TrainedNetwork(stored).model(inputs), model(inputs))
