"""bench-models at smoke scale, its gauges where the answer is known, and its claims on made-up tables."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from curvlab.lab import ClaimResult, Computed
from curvlab.lab.reporting import load_claims
from experiments.benchmarks.models.cases import build_case
from experiments.benchmarks.models.compute import repeats_of
from experiments.benchmarks.models.rounding import rounding_errors
from experiments.benchmarks.models.worker import (
    DIFFERENCES,
    GRADIENT,
    LOW_MEMORY,
    PLAIN_GRADIENT,
    PRODUCT,
    main,
    measure,
)

# One layer without a bias: 4 million parameters, 16 MiB, and hardly any activations.
LINEAR = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 2048, "out_features": 2048, "bias": False},
    "inputs": "images",
    "shape": [2048],
    "num_outputs": 2048,
    "batch_size": 2,
}
TASK = {"settings": LINEAR, "seed": 0, "device": "cpu", "num_threads": 1, "num_rounds": 1, "num_repeats": 2}


def test_target_tabulates_every_model(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/models")
    table, repeats, rounding = (pd.read_csv(folder / f"{name}.csv") for name in ("table", "repeats", "rounding"))
    assert table.model.tolist() == ["gpt2", "convnext"]
    assert (folder / "figure.png").is_file()
    assert len(repeats) == 4
    assert_close(
        repeats.memory_ratio.to_numpy(),
        (repeats.product_mib / repeats.gradient_mib).to_numpy(),
        rtol=1e-4,
        atol=0.0,
    )
    assert (table.time_to_floor > 0.5).all()
    assert (rounding[rounding.precision == "fp32"].error < 1e-5).all()
    assert rounding[rounding.precision == "bf16"].error.between(1e-4, 0.2).all()
    verdicts = {result.claim.id: result.verdict for result in load_claims(folder)}
    assert [verdicts.pop(name) for name in ("time", "low-memory-time")] == ["undecided"] * 2  # of two rounds
    names = {f"{claim}-{model}" for claim in ("memory", "low-memory") for model in ("gpt2", "convnext")}
    assert verdicts == dict.fromkeys(names, "out of reach")  # too small


def test_memory_of_a_linear_layer_is_what_it_must_be() -> None:
    measured = measure(TASK)
    assert measured["num_parameters"] == 2**22
    assert measured["held"] == 2**24 + 2 * 2048 * 4 + 2 * 8
    assert {method: len(values) for method, values in measured["rises"].items()} == {
        GRADIENT: 2,
        PLAIN_GRADIENT: 1,
        PRODUCT: 2,
        LOW_MEMORY: 2,
        DIFFERENCES: 1,
    }
    own = repeats_of("linear", measured)
    if own.gradient_rise_mib.isna().any():
        pytest.skip("this system does not tell")
    assert own.gradient_mib.between(31.5, 34).all()  # parameters and gradient
    # Parameters, vector, product, and the gradient of the one weight until it is added to the product.
    assert own.product_mib.between(63.5, 66).all()
    assert own.memory_ratio.between(1.9, 2.1).all()


def test_the_measuring_process_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    broken = TASK | {"settings": LINEAR | {"model": {"_target_": "no_such_module.Model"}}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(broken) + "\n"))
    main()
    assert "no_such_module" in json.loads(capsys.readouterr().out)["error"]


def test_rounding_is_that_of_the_precision() -> None:
    small = LINEAR | {
        "model": LINEAR["model"] | {"in_features": 64, "out_features": 5},
        "shape": [64],
        "num_outputs": 5,
    }
    rows = rounding_errors(
        small, num_vectors=2, generator=torch.Generator().manual_seed(0), device=torch.device("cpu")
    )
    errors = pd.DataFrame(rows).set_index(["matrix", "precision", "batches"])
    assert (errors.status == "done").all()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        own = errors.xs(precision, level="precision")
        unit = torch.finfo(dtype).eps
        assert (own.error > unit / 50).all()
        assert (own.error < 10 * unit).all()
    for precision in ("bf16", "fp16"):  # the vectors' and weights' own rounding comes on top
        own = errors.loc[("Gauss-Newton", precision, 1)]
        assert own.error_converted > 0.5 * own.error


def test_batches_hold_what_users_have() -> None:
    settings = LINEAR | {"shape": [6], "num_outputs": 11, "batch_size": 3}
    kinds = {"sentences": [6], "text": [6], "summaries": [6, 4]}
    for kind, shape in kinds.items():
        own = settings | {"inputs": kind, "shape": shape}
        case = build_case(own, torch.Generator().manual_seed(0), torch.device("cpu"))
        assert case.inputs["input_ids"].shape == (3, 6)
        if kind == "sentences":
            assert case.targets.shape == (3,)
        elif kind == "text":  # each token's target is the next one, and the last has none
            assert torch.equal(case.targets[:, :-1], case.inputs["input_ids"][:, 1:])
            assert (case.targets[:, -1] == -100).all()
        else:  # the decoder reads what it has to write, one behind
            assert torch.equal(case.inputs["decoder_input_ids"][:, 1:], case.targets[:, :-1])


def made_up(ratios: list[float], *, rise: float = 100.0) -> pd.DataFrame:
    columns = {
        "gradient_mib": 100.0,
        "plain_gradient_mib": 110.0,
        "product_mib": 120.0,
        "plain_ratio": 1.1,
        "differences_ratio": 1.0,
    }
    columns |= {"low_memory_mib": 104.0, "low_memory_ratio": 1.04}
    rows = [columns | {"memory_ratio": ratio, "gradient_rise_mib": rise} for ratio in ratios]
    return pd.DataFrame([{"model": "net", "repeat": index} | row for index, row in enumerate(rows)])


@pytest.mark.parametrize(
    ("ratios", "rise", "time", "expected"),
    [
        ([1.1, 1.11, 1.09], 100.0, 1.5, ["reproduced", "reproduced", "reproduced", "reproduced"]),
        ([1.1, 1.3, 1.2], 100.0, 1.55, ["undecided", "reproduced", "undecided", "undecided"]),
        ([1.4, 1.41, 1.4], 100.0, 1.7, ["not reproduced", "reproduced", "not reproduced", "not reproduced"]),
        ([1.0, 1.0, 1.0], 20.0, 1.5, ["out of reach", "out of reach", "reproduced", "reproduced"]),
    ],
)
def test_claims(
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
    ratios: list[float],
    rise: float,
    time: float,
    expected: list[str],
) -> None:
    rows = [{"model": "net", "rounds": 3}, {"model": "faster", "rounds": 3}]
    for row, own in zip(rows, (time, 1.0), strict=True):
        for column in ("time_to_floor", "low_memory_time_to_floor"):
            row |= {column: own, f"{column}_low": own - 0.08, f"{column}_high": own + 0.08}
    table = pd.DataFrame(rows)
    results = judged("benchmarks/models", computed_of({"table": table, "repeats": made_up(ratios, rise=rise)}))
    assert [result.claim.id for result in results] == ["memory-net", "low-memory-net", "time", "low-memory-time"]
    assert [result.verdict for result in results] == expected
    older = made_up(ratios, rise=rise).drop(columns="low_memory_ratio")
    results_of_old = judged("benchmarks/models", computed_of({"table": table, "repeats": older}))
    assert results_of_old[1].verdict == "out of reach"
    if expected[0] == "not reproduced":
        assert "by plain attention" in results[0].explanation
