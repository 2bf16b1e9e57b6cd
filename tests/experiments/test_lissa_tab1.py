"""lissa-tab1 end to end at smoke scale, and what its claims read off tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.reporting import load_claims
from curvlab.runs import load_config
from experiments.lissa import spectrum_units as units
from experiments.lissa.fig1_scores import _spectrum
from experiments.lissa.tab1_claims import judge_claims
from experiments.lissa.tab1_hyperparameters import SHARED, main, paper_table
from experiments.lissa.tab1_plot import draw
from experiments.task import Task

CONFIG = "lissa/tab1_hyperparameters"


class FakeRun:
    """Computes every unit and keeps its key."""

    def __init__(self) -> None:
        self.keys: dict[str, dict] = {}

    def unit(self, name: str, key: dict, compute) -> dict:
        self.keys[name] = key
        return compute()

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(sum(str(names).encode()))

    def add_matvecs(self, count: int) -> None:
        pass


def small_task(**settings) -> Task:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5), torch.randint(3, (40,))
    model = nn.Linear(5, 3)
    values = {"key": {"model": "linear"}, "loss": nn.CrossEntropyLoss(), "num_parameters": 18, **settings}
    return Task(
        name="linear",
        model=model.eval(),
        splits=None,
        train=(inputs, targets),
        num_train=40,
        train_indices=torch.arange(40),
        train_loss=1.0,
        test_accuracy=None,
        **values,
    )


def test_results_are_complete_and_follow_from_each_other(run_target) -> None:
    folder: Path = run_target(main, CONFIG) / "lissa" / "tab1" / "smoke"
    table, paper = pd.read_csv(folder / "table.csv"), pd.read_csv(folder / "paper.csv")
    assert table.task.tolist() == ["mlp-digits", "opt-documentation"]
    assert table.unit.tolist() == ["images", "tokens"]
    assert table.per_example.tolist() == [1, 128]
    for row in table.to_dict("records"):
        assert row["damping"] == pytest.approx(5 / 270 * row["lambda_max"], rel=1e-4)
        assert row["step_size"] == pytest.approx(1 / (row["lambda_max"] + row["damping"]), rel=1e-4)
        assert row["batch_size"] == np.ceil(2 * row["trace"] / row["lambda_max"])
        assert row["full_trace_per_parameter"] == pytest.approx(row["trace"] / row["parameters"], rel=1e-4)
        joint = np.hypot(row["trace_per_parameter_stderr"], row["full_trace_per_parameter_stderr"])
        assert abs(row["trace_per_parameter"] - row["full_trace_per_parameter"]) < 5 * joint
    figure = draw(table, paper)["figure.png"]
    figure.savefig(folder / "again.png", dpi=110, metadata={"Software": None})
    assert (folder / "again.png").read_bytes() == (folder / "figure.png").read_bytes()
    claims = {result.claim.id: result for result in load_claims(folder)}
    assert claims["printed-batch"].verdict == "not reproduced"
    assert claims["printed-batch"].interval.kind == "ResNet-50, printed"
    assert claims["printed-step"].verdict == "direction only"
    assert json.loads((folder / "run.json").read_text())["num_matvecs"] > 0


def test_the_spectrum_is_the_unit_of_fig1() -> None:
    cfg, task, run = load_config(CONFIG, ["preset=smoke"]), small_task(), FakeRun()
    ours = units.spectrum(run, task, cfg)
    assert ours == _spectrum(run, task, cfg)
    assert run.keys["spectrum"] == {"model": "linear", "task": "linear", "trace_probes": 8, "rtol": 0.01}
    dense = units.gauss_newton(task).to_dense().double()
    assert ours["largest_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=0.02)
    assert abs(ours["trace"] - float(dense.trace())) < 5 * ours["trace_stderr"]


def test_constants_of_language_models_count_tokens() -> None:
    """The same examples as sequences of four predictions each: C is four times larger, |B| being in tokens."""
    cfg, run = load_config(CONFIG, ["preset=smoke"]), FakeRun()
    images = small_task()
    sequences = small_task(key={"tokenizer": "none"})
    repeated = (images.train[0][:, None].expand(-1, 4, -1), images.train[1][:, None].expand(-1, 4))
    object.__setattr__(sequences, "train", repeated)
    assert units.predictions_per_example(sequences) == 4
    assert units.predictions_per_example(images) == 1
    trace = float(units.gauss_newton(images).to_dense().trace())
    found = [units.constants(run, task, cfg, trace=trace) for task in (images, sequences)]
    assert found[1]["largest"] == pytest.approx(4 * found[0]["largest"], rel=1e-4)


def test_parts_inherit_shared_settings_and_a_task_alone_has_none() -> None:
    cfg = load_config(CONFIG, ["preset=embedded", "forms.num_probes=7"])
    parts = units.parts(cfg, SHARED)
    assert [part.name for part in parts] == [
        "mlp-digits",
        "mlp-digits-early",
        "convnet-digits",
        "opt-documentation",
    ]
    assert [part.forms.num_probes for part in parts] == [7, 7, 7, 400]  # the OPT's own stays
    alone = load_config(CONFIG, ["preset=laptop", "data=mnist", "model=lenet", "also=null"])
    assert len(units.parts(alone, SHARED)) == 1


def test_claims_can_fail() -> None:
    row = {
        "task": "a", "unit": "tokens", "per_example": 10, "parameters": 100, "forms": 1600, "trace": 50.0,
        "trace_stderr": 1.0, "lambda_max": 1.0, "assumed_constant": 2.0, "constant": 5.0,
        "batch_size": 100, "batch_size_measured": 250,
        "trace_per_parameter": 0.9, "trace_per_parameter_stderr": 0.01,
        "full_trace_per_parameter": 0.5, "full_trace_per_parameter_stderr": 0.01,
    }  # fmt: skip
    verdicts = {r.claim.id: r.verdict for r in judge_claims(pd.DataFrame([row]), paper_table())}
    assert verdicts["one-sequence"] == "not reproduced"  # 100 tokens, sequences of 10
    assert verdicts["trace-unbiased"] == "not reproduced"
    assert verdicts["constant-two"] == "not reproduced"
    assert verdicts["requirement-mild"] == verdicts["batch-above-one"] == "reproduced"
    vision = {**row, "unit": "images", "constant": 1.5, "full_trace_per_parameter": 0.9}
    verdicts = {r.claim.id: r.verdict for r in judge_claims(pd.DataFrame([vision]), paper_table())}
    assert verdicts["one-sequence"] == "out of reach"
    assert verdicts["trace-unbiased"] == verdicts["constant-two"] == "reproduced"
