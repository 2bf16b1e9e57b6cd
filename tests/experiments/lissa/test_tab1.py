"""lissa-tab1 end to end at smoke scale, and what its claims read off tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from experiments.lissa.tab1 import paper_table


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/tab1")


def test_results_are_complete_and_follow_from_each_other(smoke: Path) -> None:
    table = read_table(smoke, "table")
    assert table.task.tolist() == ["mlp-8-digits-200", "opt-1-16-documentation-120"]
    assert table.unit.tolist() == ["images", "tokens"]
    assert table.per_example.tolist() == [1, 128]
    for row in table.to_dict("records"):
        assert row["damping"] == pytest.approx(5 / 270 * row["lambda_max"], rel=1e-4)
        assert row["step_size"] == pytest.approx(1 / (row["lambda_max"] + row["damping"]), rel=1e-4)
        assert row["batch_size"] == np.ceil(2 * row["trace"] / row["lambda_max"])
        assert row["full_trace_per_parameter"] == pytest.approx(row["trace"] / row["parameters"], rel=1e-4)
        assert row["constant_at_least"] <= row["constant_at_most"]
        assert row["needed_at_least"] <= row["needed_at_most"]
        joint = np.hypot(row["trace_per_parameter_stderr"], row["full_trace_per_parameter_stderr"])
        assert abs(row["trace_per_parameter"] - row["full_trace_per_parameter"]) < 5 * joint
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["printed-batch"].verdict == "refuted"
    assert "ResNet-50" in claims["printed-batch"].explanation
    assert claims["printed-step"].verdict == "refuted"
    assert claims["printed-steps"].value == pytest.approx(500 * 0.001 * 5 / 2)  # OPT's row, and Llama's
    assert claims["printed-steps"].verdict == "refuted"
    assert json.loads((smoke / "run.json").read_text())["num_matvecs"] > 0


def test_claims_can_fail(computed_of, judged) -> None:
    row = {
        "task": "a", "train_loss": 1.0, "unit": "tokens", "per_example": 10, "parameters": 100,
        "forms": 1600, "trace": 50.0,
        "trace_stderr": 1.0, "lambda_max": 0.3, "assumed_constant": 2.0, "constant": 5.0,
        "batch_size": 334, "batch_size_measured": 1667,
        "trace_per_parameter": 0.9, "trace_per_parameter_stderr": 0.01, "exact_trace": np.nan,
        "full_trace_per_parameter": 0.5, "full_trace_per_parameter_stderr": 0.01,
        "constant_at_least": 5.0, "constant_at_most": np.inf, "needed_at_least": 833.0, "needed_at_most": np.inf,
    }  # fmt: skip

    def verdicts(row: dict) -> dict[str, str]:
        computed = computed_of({"table": pd.DataFrame([row]), "paper": paper_table()})
        return {result.claim.id: result.verdict for result in judged("lissa/tab1", computed)}

    found = verdicts(row)
    assert found["one-sequence"] == "not reproduced"  # 333 tokens
    assert found["trace-unbiased"] == "not reproduced"
    assert found["constant-two"] == found["requirement-mild-measured"] == "not reproduced"
    assert found["requirement-mild"] == "not reproduced"
    assert found["batch-above-one"] == "reproduced"
    mild = {"constant_at_least": 1.5, "constant_at_most": 1.9, "needed_at_least": 90.0, "needed_at_most": 150.0}
    found = verdicts({**row, **mild, "unit": "images", "exact_trace": 90.0})
    assert found["one-sequence"] == "out of reach"
    assert found["trace-unbiased"] == found["constant-two"] == "reproduced"
    assert found["requirement-mild-measured"] == "reproduced"
    found = verdicts({**row, **mild, "train_loss": 0.1})
    assert found["constant-two"] == "out of reach"  # no network in the paper's regime
    assert found["constant-two-saturated"] == "reproduced"
    found = verdicts({**row, **mild, "constant_at_most": 2.5, "needed_at_most": 250.0, "exact_trace": 82.0})
    assert found["constant-two"] == "direction only"
    assert found["requirement-mild-measured"] == "undecided"  # neither bound says it
    assert found["trace-unbiased"] == "undecided"  # 1.098 ± 0.024
