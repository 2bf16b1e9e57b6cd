"""The targets of the NGD paper at smoke scale, and what they compute beside the library."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.optim import ExactNGD
from curvlab.reporting import load_claims
from curvlab.training import Learner, MeanLoss, StepInfo, TrainingBatch
from experiments.ngd.fig1_claims import judge_claims as judge_fig1
from experiments.ngd.fig1_claims import summary_table
from experiments.ngd.fig1_llc_width import main as fig1
from experiments.ngd.fig2_claims import judge_claims as judge_fig2
from experiments.ngd.fig2_llc_trace_epochs import main as fig2
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.optimizers import make_optimizer


def test_fig1_end_to_end(run_target: Callable[..., Path]) -> None:
    folder = run_target(fig1, "ngd/fig1_llc_width") / "ngd" / "fig1" / "smoke"
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 2 * 2  # optimizers, seeds
    counted = table.converged & table.valid
    assert table.llc.notna().equals(counted)  # no LLC where training has not converged or chains have not mixed
    assert table.estimate.notna().all()
    assert (folder / "figure.png").is_file()
    assert {result.claim.id for result in load_claims(folder)} == {
        "llc-higher-1-hidden-layer",
        "llc-significant-1-hidden-layer",
        "llc-higher-from-minimum-1-hidden-layer",
        *(
            f"{quantity}-higher-{setting}-1-hidden-layer-width-8"
            for quantity in ("llc", "trace")
            for setting in ("tuned", "matched")
        ),
    }
    tuning = pd.read_csv(folder / "tuning.csv")
    assert tuning.groupby("optimizer").size().tolist() == [2 * 2] * 2  # learning rates, seeds: equal budgets
    assert set(tuning.epochs) == {25}
    assert len(pd.read_csv(folder / "settings.csv")) == 2 * 3  # quantities, settings
    assert (folder / "figure_fair.png").is_file()


def test_rates_that_diverge_are_no_choice(run_target: Callable[..., Path]) -> None:
    changed = ["fair.lrs=[0.02,1e30]", "fair.seeds=[0]"]
    folder = run_target(fig1, "ngd/fig1_llc_width", *changed) / "ngd" / "fig1"
    (tuning,) = folder.glob("*/tuning.csv")
    table = pd.read_csv(tuning)
    assert table[table.lr > 1].train_loss.isna().all()
    assert table[table.chosen].lr.unique().tolist() == [0.02]


class Normalised(nn.Sequential):
    def __init__(self, input_shape: list[int], num_outputs: int, **ignored: object) -> None:
        first = nn.Linear(math.prod(input_shape), 4)
        super().__init__(nn.Flatten(), first, nn.BatchNorm1d(4), nn.Linear(4, num_outputs))


def test_running_statistics_are_kept_along_a_trajectory(run_target: Callable[..., Path]) -> None:
    changed = [f"models.ffnn._target_={__name__}.Normalised", "seeds=[0]"]
    folder = run_target(fig2, "ngd/fig2_llc_trace_epochs", *changed) / "ngd" / "fig2"
    (path,) = folder.glob("*/table.csv")
    table = pd.read_csv(path)
    for quantity in ("llc", "trace"):
        assert table[quantity].notna().all()


def test_fig2_end_to_end(run_target: Callable[..., Path]) -> None:
    folder = run_target(fig2, "ngd/fig2_llc_trace_epochs") / "ngd" / "fig2" / "smoke"
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 2 * 2 * 3  # optimizers, seeds, checkpoints
    assert table.groupby(["optimizer", "seed"]).train_loss.is_monotonic_decreasing.all()
    assert np.isfinite(table[["trace", "trace_stderr", "wbic", "update_norm"]]).all(axis=None)
    for name in ("figure.png", "matched.csv"):
        assert (folder / name).is_file()
    assert len(load_claims(folder)) == 5


def test_matched_loss_compares_at_equal_loss() -> None:
    # Both follow llc = -10 ln(loss), NGD plus 3; at equal epochs NGD, which fits faster, is far higher.
    losses = {"sgd": [1.0, 0.5, 0.2], "ngd": [0.4, 0.1, 0.05]}
    rows = [
        {
            "model": "m",
            "seed": 0,
            "optimizer": name,
            "train_loss": loss,
            "valid": True,
            "llc": -10 * math.log(loss) + 3 * (name == "ngd"),
            "trace": 1.0,
        }
        for name, values in losses.items()
        for loss in values
    ]
    found = matched_differences(pd.DataFrame(rows)).set_index("quantity")
    assert found.loc["llc", "difference"] == pytest.approx(3)
    assert found.loc["llc", ["loss_low", "loss_high"]].tolist() == pytest.approx([0.2, 0.4])
    assert found.loc["trace", "difference"] == pytest.approx(0)
    apart = pd.DataFrame(
        [row | {"train_loss": row["train_loss"] / 100 ** (row["optimizer"] == "ngd")} for row in rows]
    )
    assert matched_differences(apart).difference.isna().all()


def fig1_rows(ngd: list[float], train_loss: float = 0.01) -> pd.DataFrame:
    rows = []
    for name, values in {"sgd": [10.0, 10.2, 9.8], "ngd": ngd}.items():
        for seed, llc in enumerate(values):
            row = {
                "panel": "1 hidden layer",
                "width": 8,
                "optimizer": name,
                "seed": seed,
                "llc": llc,
                "descent": 1.0 if name == "sgd" else 0.0,
                "problem": "",
            }
            rows.append(row | {"train_loss": train_loss, "validation_loss": 0.1, "converged": not math.isnan(llc)})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("ngd", "verdicts"),
    [
        ([12.0, 12.1, 12.3], ["reproduced", "reproduced", "reproduced"]),
        (
            [10.7, 10.8, 10.6],
            ["reproduced", "reproduced", "not reproduced"],
        ),  # SGD's are 1 higher from the minimum
        ([8.0, 8.1, 8.3], ["not reproduced", "reproduced", "not reproduced"]),
        ([9.9, 10.0, 10.2], ["undecided", "not reproduced", "not reproduced"]),
        ([math.nan] * 3, ["out of reach"] * 3),
    ],
)
def test_fig1_verdicts(ngd: list[float], verdicts: list[str]) -> None:
    table = fig1_rows(ngd)
    results = judge_fig1(table, summary_table(table), claimed="ngd")
    assert [result.verdict for result in results] == verdicts


def test_fig2_verdicts() -> None:
    rows = [
        {"model": "m", "optimizer": name, "seed": seed, "epoch": epoch, "train_loss": 1 / epoch, "valid": True}
        | {
            "llc": 10.0 + seed / 10 + 5 * (name == "ngd"),
            "trace": (100.0 + seed) / epoch * (1 - (name == "ngd") / 2),
        }
        for name in ("sgd", "ngd")
        for seed in range(3)
        for epoch in (1, 2, 4)
    ]
    table = pd.DataFrame(rows)
    results = {result.claim.id: result for result in judge_fig2(table, matched_differences(table))}
    assert {key: result.verdict for key, result in results.items()} == {
        "llc-higher-m": "reproduced",
        "trace-higher-m": "not reproduced",
        "llc-plateaus-sgd-m": "reproduced",
        "llc-plateaus-ngd-m": "reproduced",
        "trace-decreases-m": "reproduced",
    }
    assert results["trace-higher-m"].value == pytest.approx(-0.5)
    table.valid = False
    verdicts = [result.verdict for result in judge_fig2(table, matched_differences(table))]
    assert verdicts == ["out of reach", "not reproduced", "out of reach", "out of reach", "reproduced"]
    table.valid = table.optimizer == "ngd"
    verdicts = [result.verdict for result in judge_fig2(table, matched_differences(table))]
    assert verdicts == ["out of reach", "not reproduced", "out of reach", "reproduced", "reproduced"]


def batch() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, dtype=torch.float64, generator=generator))
    inputs = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return model, inputs, torch.randint(2, (8,), generator=generator)


@pytest.mark.parametrize("name", ["sgd", "ngd", "exact_ngd"])
def test_every_optimizer_goes_downhill(name: str) -> None:
    model, inputs, targets = batch()
    step = make_step(model, inputs, targets, {"name": name, "lr": 0.05})
    losses = [step(TrainingBatch(inputs, targets)).loss for _ in range(20)]
    assert losses[-1] < losses[0]


def make_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, settings: dict[str, Any]
) -> Callable[[TrainingBatch], StepInfo]:
    loss = nn.CrossEntropyLoss()
    optimizer, step = make_optimizer(model, loss, (inputs, targets), settings)
    return partial(step, Learner(model, MeanLoss(loss), optimizer))


def test_exact_ngd_takes_the_fisher_matrix_of_its_batch() -> None:
    model, inputs, targets = batch()
    loss = nn.CrossEntropyLoss()
    step = make_step(model, inputs, targets, {"name": "exact_ngd", "lr": 1.0, "alpha": 0.5, "rescale": True})
    step(TrainingBatch(inputs, targets))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    step(TrainingBatch(inputs[:4], targets[:4]))
    own = FisherOperator(linear := copy_of(model, start), loss, (inputs[:4], targets[:4]))
    loss(linear(inputs[:4]), targets[:4]).backward()
    ExactNGD(linear.parameters(), own, 1.0, alpha=0.5, rescale=True).step()
    for expected, found in zip(linear.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def copy_of(model: nn.Module, values: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), values, strict=True):
            parameter.copy_(value)
    return other


def test_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match="choose sgd, ngd or exact_ngd"):
        make_step(*batch(), {"name": "adam", "lr": 0.1})
