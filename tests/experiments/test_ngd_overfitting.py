"""ngd-fig7 and ngd-fig8 at smoke scale, and their claims on synthetic tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab import runs
from curvlab.reporting import load_claims
from experiments.ngd.fig7_overfitting import main as fig7
from experiments.ngd.fig7_plot import draw as draw_fig7
from experiments.ngd.fig8_plot import draw as draw_fig8
from experiments.ngd.fig8_wbic import main as fig8
from experiments.ngd.overfitting import since_minimum, with_label_noise
from experiments.ngd.overfitting_claims import judge_fig7, judge_fig8
from experiments.ngd.trajectories import load_problem


def test_fig7_and_fig8_end_to_end_with_one_set_of_units(
    run_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_target(fig7, "ngd/fig7_overfitting") / "ngd"
    table = pd.read_csv(results / "fig7" / "smoke" / "table.csv")
    assert len(table) == 2 * 2 * 5  # optimizers, seeds, checkpoints
    rises = since_minimum(table).query("quantity == 'validation_loss' and optimizer == 'sgd'").change
    assert (rises > 0.1).all()  # an overfitting regime, or the figure shows nothing
    assert len(load_claims(results / "fig7" / "smoke")) == 6

    def nothing_new(*_: Any, **__: Any) -> None:
        raise AssertionError("ngd-fig8 computes what ngd-fig7 has stored")

    for name in ("_trained", "_llc", "_trace"):
        monkeypatch.setattr(f"experiments.ngd.trajectories.{name}", nothing_new)
    results = run_target(fig8, "ngd/fig8_wbic") / "ngd"
    assert pd.read_csv(results / "fig8" / "smoke" / "table.csv").equals(table)
    assert [result.claim.id for result in load_claims(results / "fig8" / "smoke")] == [
        "overfits-ngd",
        "wbic-increases-ngd",
        "wbic-follows-validation-loss-ngd",
    ]
    for item in ("fig7", "fig8"):
        assert (results / item / "smoke" / "figure.png").is_file()


@pytest.mark.parametrize("preset", ["smoke", "embedded", "laptop", "paper"])
def test_fig8_has_the_settings_of_fig7(preset: str) -> None:
    first, second = (
        runs.load_config(name, [f"preset={preset}"]) for name in ("ngd/fig7_overfitting", "ngd/fig8_wbic")
    )
    for node in ("data", "model", "optimizers", "training", "llc", "trace", "seeds", "label_noise", "seed"):
        assert first[node] == second[node]


def test_label_noise_changes_that_share_of_the_training_labels() -> None:
    cfg = runs.load_config("ngd/fig7_overfitting", ["preset=smoke", "tracker=none"])
    run = runs.Run(cfg, paper="ngd", item="fig7", title="")
    problem = load_problem(run, cfg.data, cfg.model, "overfitting")
    noisy = with_label_noise(run, problem, 0.4)
    assert int((noisy.train[1] != problem.train[1]).sum()) == 40  # of 100: no label is drawn as it was
    assert noisy.train[1].min() >= 0
    assert noisy.train[1].max() <= 9
    assert noisy.key != problem.key  # else the store would mix them up
    assert with_label_noise(run, noisy, 0.0) is noisy
    with pytest.raises(ValueError, match="from 0 to below 1, got 1"):
        with_label_noise(run, problem, 1.0)
    assert OmegaConf.is_config(problem.model)


LOSSES = (1.0, 0.8, 1.0, 1.2)  # validation, minimum at the second checkpoint


def rows(llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...] = LOSSES) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"optimizer": name, "seed": seed, "epoch": epoch, "num_train": 100, "valid": True}
            | {"train_loss": 0.5 / epoch, "validation_loss": losses[index], "validation_accuracy": 0.5}
            | {"llc": llc[index] + 0.01 * seed, "trace": trace[index] + 0.01 * seed}
            | {"wbic": 50 / epoch + llc[index] * math.log(100) + 0.01 * seed}
            for name in ("sgd", "ngd")
            for seed in range(3)
            for index, epoch in enumerate((1, 2, 4, 8))
        ]
    )


UP, DOWN = (1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0)


def test_since_minimum_starts_at_the_minimum() -> None:
    table = since_minimum(rows((9.0, *UP[1:]), DOWN))
    llc = table[table.quantity == "llc"]
    assert (llc.minimum_epoch == 2).all()
    assert (llc.checkpoints == 3).all()
    assert llc.change.iloc[0] == pytest.approx(4 / 2 - 1)
    assert (llc.rank_correlation == 1).all()
    assert (table[table.quantity == "trace"].rank_correlation == -1).all()


@pytest.mark.parametrize(
    ("llc", "trace", "losses", "expected"),
    [
        (UP, UP, LOSSES, ["reproduced", "reproduced", "reproduced"]),
        (UP, DOWN, LOSSES, ["reproduced", "reproduced", "not reproduced"]),
        (DOWN, UP, LOSSES, ["reproduced", "not reproduced", "reproduced"]),
        (UP, UP, (1.0, 0.8, 0.82, 0.84), ["direction only", "reproduced", "reproduced"]),
        (UP, UP, (1.0, 0.9, 0.8, 0.7), ["not reproduced", "out of reach", "out of reach"]),
    ],
)
def test_fig7_verdicts(
    llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...], expected: list[str]
) -> None:
    table = rows(llc, trace, losses)
    verdicts = [result.verdict for result in judge_fig7(since_minimum(table))]
    assert verdicts == 2 * expected
    draw_fig7(table)


def test_fig7_without_valid_estimates_judges_the_trace_alone() -> None:
    table = rows(UP, UP).assign(valid=False)
    results = judge_fig7(since_minimum(table))
    assert [result.verdict for result in results] == 2 * ["reproduced", "out of reach", "reproduced"]
    assert "3 of 3 seeds overfit, 0 of them with enough valid estimates" in results[1].explanation
    draw_fig7(table)
    draw_fig8(table)


def test_fig8_verdicts_and_the_terms_that_explain_them() -> None:
    rising = rows(tuple(10 * value for value in UP), UP)  # LLC ln n grows faster than n L falls
    assert [result.verdict for result in judge_fig8(since_minimum(rising), rising)] == ["reproduced"] * 3
    falling = rows(tuple(value / 10 for value in UP), UP)
    results = judge_fig8(since_minimum(falling), falling)
    assert [result.verdict for result in results] == ["reproduced", "not reproduced", "not reproduced"]
    assert results[2].value == pytest.approx(-1)
    assert "n L(w*) changes by -18.75 nats, and LLC ln n by +0.921 (" in results[2].explanation
    draw_fig8(falling)
