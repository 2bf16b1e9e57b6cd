"""bench-attribution end to end at smoke scale, what peers are given; bench-retraining. No time is asserted."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.training import shuffled_batches
from experiments.benchmarks.attribution import methods as methods_module
from experiments.benchmarks.attribution.libraries.worker import TrainedNetwork
from experiments.benchmarks.attribution.methods import (
    COSINE,
    DOT,
    EKFAC,
    FILTER,
    INFLUENCE,
    PBRF,
    PBRF_HALVES,
    PBRF_PAPER,
    RUN_DAMPING,
    SEGMENTS,
    TRAK,
    UNROLLED,
    UNROLLED_ORDERS,
)
from experiments.benchmarks.attribution.ranks import OTHER, SAME, correlations
from experiments.benchmarks.attribution.removal import RANDOM
from experiments.benchmarks.attribution.retraining import (
    HALVES,
    LEFT_OUT,
    Retrained,
    floor_seconds,
    ratios,
    summary,
)
from experiments.benchmarks.attribution.which_score import RESPONSES

RANKING = {DOT, COSINE, INFLUENCE, RUN_DAMPING, FILTER, EKFAC, SEGMENTS, UNROLLED, UNROLLED_ORDERS}
RANKING |= {PBRF, PBRF_PAPER}
OURS = RANKING | {PBRF_HALVES}


def test_every_method_is_judged_by_retraining(run_smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CURVLAB_PEERS_PYTHON", raising=False)
    folder = run_smoke("benchmarks/attribution", "parts=[scores]")
    table, queries = (read_table(folder, name) for name in ("table", "queries"))
    done = table[(table.status == "done") & (table.method != RANDOM)]
    assert set(done.method) == OURS
    peers = table[table.status == "not installed"]
    assert peers.groupby("method").damping.apply(list).to_dict() == {
        "kronfluence EK-FAC": [0.01, 1],
        "dattri EK-FAC as shipped": [0.01, 1],
        "dattri EK-FAC mended": [0.01, 1],
        TRAK: [10, 100, 1000],
        "TRAK as shipped": [pytest.approx(float("nan"), nan_ok=True)],
    }
    assert done.groupby("method").size()[[INFLUENCE, EKFAC, FILTER]].tolist() == [2, 2, 1]
    for prefix in ("lds", "lds_other"):
        assert (done[f"{prefix}_low"] <= done[prefix]).all()
        assert (done[prefix] <= done[f"{prefix}_high"]).all()
    # Twelve halves of a short training: all methods see what helps, and the exact derivative sees most.
    best = done.groupby("method").lds.max()
    assert best.min() > 0.3
    assert best.idxmax() in (UNROLLED, UNROLLED_ORDERS)
    assert best[UNROLLED] > 0.85
    # Without its top 5 % a test loss rises, whoever ranks; only the best damping of a method is tried.
    removed = done[done.removal_5.notna()]
    assert sorted(removed.method) == sorted(RANKING)
    assert (removed.removal_5 > 0.1).all()
    at_random = table[table.method == RANDOM].iloc[0]
    assert at_random.removal_5_low < at_random.removal_5 < at_random.removal_5_high < 0.1
    removals = read_table(folder, "removals")
    rises = removals.groupby("method").rise.mean()
    for row in removed.itertuples():
        assert rises[row.method] == pytest.approx(row.removal_5, abs=1e-5)
    assert removals.random.mean() == pytest.approx(at_random.removal_5, abs=1e-5)
    # Influence is what the PBRF of an example comes to, at one damping; the quality of the PBRF stands beside it.
    responses = done[done.method.isin((PBRF, PBRF_HALVES))]
    assert (responses.gradient_norm < 0.1).all()
    assert done.set_index("method").pbrf[RUN_DAMPING] > 0.9
    means = queries.fillna({"damping": 0}).groupby(["method", "damping", "orders"]).lds.mean()
    for row in done.fillna({"damping": 0}).itertuples():
        assert means[row.method, row.damping, SAME] == pytest.approx(row.lds, abs=1e-5)
        assert means[row.method, row.damping, OTHER] == pytest.approx(row.lds_other, abs=1e-5)
        if np.isfinite(row.pbrf):
            assert means[row.method, row.damping, RESPONSES] == pytest.approx(row.pbrf, abs=1e-5)
    # All that the intervals of the claims are made of, at the best damping of each method.
    ranks = read_table(folder, "ranks")
    for orders, prefix in ((SAME, "lds"), (OTHER, "lds_other")):
        for row in done.loc[done.groupby("method").lds.idxmax()].itertuples():
            assert correlations(ranks, row.method, orders).mean() == pytest.approx(getattr(row, prefix), abs=1e-5)
    timing = read_table(folder, "timing")
    assert set(timing.method) == OURS | {"one training", "12 halves together"}
    assert timing.set_index("method").trainings["one training"] == 1
    assert (folder / "figure.png").is_file()
    rest = read_table(folder, "rest")
    assert rest.groupby("num_epochs").size().tolist() == [6, 6]
    # What rest says of a score is what the table says of it.
    own = rest[rest.num_epochs == 5].set_index("predictor")
    for name in (FILTER, SEGMENTS, UNROLLED):
        assert own.lds[name] == pytest.approx(done.set_index("method").lds[name], abs=1e-5)
    part_way = read_table(folder, "part_way").set_index(["predictor", "share"]).lds
    assert part_way[UNROLLED].index.tolist() == [0.25, 0.5, 1]
    for name in (FILTER, SEGMENTS, UNROLLED):
        assert part_way[name, 1] == own.lds[name]
        assert part_way[name, 0.25] == own.lds_part_way[name]
    answer = read_table(folder, "which_score")
    # LDS twice; one removal, random ones included; and the PBRF, which is not asked about itself
    sizes = [len(OURS)] * 2 + [len(RANKING) + 1, len(RANKING) - 1]
    assert sorted(answer.groupby("question").size()) == sorted(sizes)
    lds = answer[answer.question.str.endswith("in the same order of batches")]
    assert lds.score.iloc[0] == best.idxmax()
    ranked = lds["out of reach"].isna()
    assert lds[ranked].agreement.is_monotonic_decreasing
    assert (lds[~ranked].score.str.startswith("PBRF")).all()
    assert len(load_claims(folder)) == 15 + 3  # and those of retraining, which was not asked for


def test_an_average_over_orders_takes_none_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[int] = []

    def trained(order: int) -> SimpleNamespace:
        averaged.append(order)
        return SimpleNamespace(**shared, arguments=(), training=SimpleNamespace(rule=None), length=None)

    scores = SimpleNamespace(scores=torch.zeros(1, 1))
    monkeypatch.setattr(methods_module, "unrolled_response", lambda *_, run: scores)
    settings = {"dampings": [], "ekfac_dampings": [], "num_orders": 3, "rtol": 0.1, "segments": {}, "peers": {}}
    settings |= {"responses": {}, "pbrf_at_paper_damping": False, "ekfac_max_size": None}
    settings |= {"num_queries": 1, "num_subsets": 1, "peers_python": None, "time_limit": 1, "memory_limit": 1}
    none = dict.fromkeys(("run", "model", "loss", "train", "test"))
    shared = none | {"settings": OmegaConf.create(settings), "trained": trained, "key": {}}
    every = methods_module.methods(trained(0), torch.ones(1, 1))  # type: ignore[arg-type]
    averaged.clear()
    next(method for method in every if method.name == UNROLLED_ORDERS).compute()
    assert len(averaged) == 3
    assert not set(averaged) & set(range(3))  # of the networks on halves, whose losses judge


@pytest.mark.parametrize(("activation", "module"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
def test_peers_get_the_network_with_its_activation(activation: str, module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), module(), nn.Linear(4, 3))
    inputs = torch.randn(6, 5)
    stored = {"sizes": [5, 4, 3], "activation": activation, "damping": 0.1}
    stored["parameters"] = [parameter.detach() for parameter in model.parameters()]
    stored |= dict.fromkeys(("train_inputs", "test_inputs"), inputs)
    stored |= dict.fromkeys(("train_targets", "test_targets"), torch.zeros(6).long())
    torch.testing.assert_close(TrainedNetwork(stored).model(inputs), model(inputs))


# ------------------------------------------------------------------------------------------------ bench-retraining
def test_both_ways_end_at_the_same_parameters(run_smoke) -> None:
    folder = run_smoke("benchmarks/attribution", "parts=[retraining]")
    names = ("retraining", "retraining_timing", "floors")
    table, timing, floors = (read_table(folder, name) for name in names)
    assert table[["dtype", "what", "copies"]].to_numpy().tolist() == [
        [dtype, what, copies] for dtype in ("float64", "float32") for what, copies in ((LEFT_OUT, 6), (HALVES, 12))
    ]
    assert len(timing) == 3 * len(table)
    assert (table["largest move"] > 0.01).all()  # they went somewhere
    assert (table[table.dtype == "float64"]["largest difference"] < 1e-12).all()
    assert (table[table.dtype == "float32"]["largest difference"] < 1e-5).all()
    assert (timing[["seconds_one_by_one", "seconds_together"]] > 0).all(axis=None)
    assert (floors[["products ms", "batched_products ms", "update ms"]] > 0).all(axis=None)
    results = [result for result in load_claims(folder) if "parts does not name" not in (result.explanation or "")]
    verdicts = {result.claim.id: result.verdict for result in results}
    assert verdicts["same-parameters-mlp-8-digits-200"] == "reproduced"
    assert len(verdicts) == 5  # that, and two comparisons in two precisions


def retrained(task: str, dtype: str, data: tuple, initial: nn.Module, batches: list, hyper: dict) -> Retrained:
    settings = OmegaConf.create({"training": hyper})
    splits: Any = SimpleNamespace(task=task, train=data[0])
    return Retrained(None, "net", settings, splits, {}, dtype, data, initial, batches)  # type: ignore[arg-type]


def test_one_by_one_leaves_out_what_has_no_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (12,), generator=generator)
    initial = nn.Linear(3, 2).double()
    batches = shuffled_batches(12, batch_size=4, num_epochs=2, generator=generator)
    hyper = {"lr": 0.3, "momentum": 0.5}
    network = retrained("classification", "float64", (inputs, targets), initial, batches, hyper)
    assert (network.num_train, network.num_parameters) == (12, 8)
    weights = torch.ones(2, 12)
    weights[1, 5] = 0.0
    expected = []
    for left_out in (None, 5):  # by hand: sums over the kept examples, divided by the batch size
        model = copy.deepcopy(network.initial)
        stepper = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
        for batch in network.batches:
            stepper.zero_grad()
            kept = batch[batch != left_out] if left_out is not None else batch
            (nn.functional.cross_entropy(model(inputs[kept]), targets[kept], reduction="sum") / 4).backward()
            stepper.step()
        expected.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for way in (network.one_by_one, network.together):
        torch.testing.assert_close(way(weights), torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_floor_is_of_one_copys_share() -> None:
    ticks = iter(range(100))
    data, model = (
        (torch.zeros(4, 3), torch.zeros(4, 1)),
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)),
    )
    network = retrained("regression", "float32", data, model, [torch.arange(4)], {"lr": 0.1})
    found = floor_seconds(network, 2, clock=lambda: float(next(ticks)), num_steps=5)
    assert found == dict.fromkeys(("products", "batched_products", "update"), pytest.approx(0.1))


def made_up(what: str, one_by_one: float, together: float, *, difference: float = 1e-9) -> pd.DataFrame:
    shared = {"task": "net", "dtype": "float64", "what": what, "copies": 20 if what == LEFT_OUT else 100}
    shared |= {"parameters": 10, "steps": 10, "batch_size": 4, "difference": difference, "moved": 0.1}
    slow = np.array([1.0, 1.5, 3.0])
    seconds = {"seconds_one_by_one": one_by_one * slow, "seconds_together": together * slow}
    return pd.DataFrame(shared | {"repeat": range(3)} | seconds)


def test_a_ratio_is_that_of_one_repeat() -> None:
    assert ratios(made_up(LEFT_OUT, 4.0, 1.0)).tolist() == [4.0, 4.0, 4.0]
    assert ratios(made_up(HALVES, 0.5, 4.0)).tolist() == [8.0, 8.0, 8.0]
    (row,) = summary(made_up(LEFT_OUT, 4.0, 1.0)).to_dict("records")
    assert (row["ratio"], row["ratio low"], row["repeats"]) == (4.0, 4.0, 3)
    assert row["ms one step one by one"] == pytest.approx(30.0)  # 6 s, 10 steps of 20 trainings
    assert row["ms one step together, each"] == pytest.approx(7.5)
    (row,) = summary(made_up(HALVES, 0.5, 4.0)).to_dict("records")
    assert row["ms one step one by one"] == pytest.approx(75.0)  # 0.75 s, 10 steps of one training
