"""bench-retraining at smoke scale, and its ratios on made-up seconds. No time is asserted."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.training import shuffled_batches
from experiments.benchmarks.attribution.retraining import HALVES, LEFT_OUT, Network, floor_seconds, ratios, summary


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


def test_one_by_one_leaves_out_what_has_no_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (12,), generator=generator)
    initial = nn.Linear(3, 2).double()
    batches = shuffled_batches(12, batch_size=4, num_epochs=2, generator=generator)
    hyper = {"lr": 0.3, "momentum": 0.5}
    network = Network("net", "float64", nn.CrossEntropyLoss(), (inputs, targets), initial, batches, hyper, {})
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
    network = Network("net", "float32", nn.MSELoss(), data, model, [torch.arange(4)], {"lr": 0.1}, {})
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
