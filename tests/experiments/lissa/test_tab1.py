"""lissa-tab1 end to end at smoke scale, and what its claims read off tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import load_claims
from experiments.lissa.tab1 import TARGET
from experiments.lissa.tab1.compute import paper_table
from experiments.target import load_config, task_settings
from experiments.target.execution import draw_target


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/tab1")


def test_results_are_complete_and_follow_from_each_other(smoke: Path) -> None:
    table = pd.read_csv(smoke / "table.csv")
    assert table.task.tolist() == ["mlp-8-digits-200", "opt-1-16-documentation-120"]
    assert table.unit.tolist() == ["images", "tokens"]
    assert table.per_example.tolist() == [1, 128]
    for row in table.to_dict("records"):
        assert row["damping"] == pytest.approx(5 / 270 * row["lambda_max"], rel=1e-4)
        assert row["step_size"] == pytest.approx(1 / (row["lambda_max"] + row["damping"]), rel=1e-4)
        assert row["batch_size"] == np.ceil(2 * row["trace"] / row["lambda_max"])
        assert row["full_trace_per_parameter"] == pytest.approx(row["trace"] / row["parameters"], rel=1e-4)
        joint = np.hypot(row["trace_per_parameter_stderr"], row["full_trace_per_parameter_stderr"])
        assert abs(row["trace_per_parameter"] - row["full_trace_per_parameter"]) < 5 * joint
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["printed-batch"].verdict == "not reproduced"
    assert claims["printed-batch"].interval.kind == "ResNet-50, printed"
    assert claims["printed-step"].verdict == "direction only"
    assert claims["printed-steps"].value == pytest.approx(500 * 0.001 * 5 / 2)  # OPT's row, and Llama's
    assert claims["printed-steps"].verdict == "direction only"
    assert json.loads((smoke / "run.json").read_text())["num_matvecs"] > 0


def test_figure_is_drawn_again_from_the_tables_alone(smoke: Path) -> None:
    before = (smoke / "figure.png").read_bytes()
    draw_target(TARGET, smoke)
    assert (smoke / "figure.png").read_bytes() == before


def test_tasks_share_settings_and_change_their_own() -> None:
    tasks = task_settings(load_config(TARGET, ["preset=embedded", "forms.num_probes=7"]))
    assert [own.forms.num_probes for own in tasks.values()] == [7, 7, 7, 400]  # the OPT's own stays
    alone = task_settings(load_config(TARGET, ["preset=laptop", "task=opt_3_128_ptb"]))
    assert list(alone) == ["opt_3_128_ptb"]


def test_claims_can_fail(computed_of, judged) -> None:
    row = {
        "task": "a", "unit": "tokens", "per_example": 10, "parameters": 100, "forms": 1600, "trace": 50.0,
        "trace_stderr": 1.0, "lambda_max": 1.0, "assumed_constant": 2.0, "constant": 5.0,
        "batch_size": 100, "batch_size_measured": 250,
        "trace_per_parameter": 0.9, "trace_per_parameter_stderr": 0.01,
        "full_trace_per_parameter": 0.5, "full_trace_per_parameter_stderr": 0.01,
    }  # fmt: skip

    def verdicts(row: dict) -> dict[str, str]:
        computed = computed_of({"table": pd.DataFrame([row]), "paper": paper_table()})
        return {result.claim.id: result.verdict for result in judged("lissa/tab1", computed)}

    found = verdicts(row)
    assert found["one-sequence"] == "not reproduced"  # 100 tokens, sequences of 10
    assert found["trace-unbiased"] == "not reproduced"
    assert found["constant-two"] == "not reproduced"
    assert found["requirement-mild"] == found["batch-above-one"] == "reproduced"
    found = verdicts({**row, "unit": "images", "constant": 1.5, "full_trace_per_parameter": 0.9})
    assert found["one-sequence"] == "out of reach"
    assert found["trace-unbiased"] == found["constant-two"] == "reproduced"
