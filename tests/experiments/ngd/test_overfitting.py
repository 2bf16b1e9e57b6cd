"""ngd-fig7 and ngd-fig8 at smoke scale, and their claims on synthetic tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed, all_targets, load_config, task_settings
from experiments.ngd.overfitting import last_epoch_table, since_minimum

Judge = Callable[[str, pd.DataFrame], list[ClaimResult]]


@pytest.fixture
def judge(computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]) -> Judge:
    """Return a function that judges a made-up table."""
    return lambda key, table: judged(key, computed_of({"table": table, "summary": since_minimum(table)}))


def test_fig7_and_fig8_have_one_set_of_units(run_smoke: Callable[..., Path]) -> None:
    fig7 = run_smoke("ngd/fig7")
    table = pd.read_csv(fig7 / "table.csv")
    assert len(table) == 2 * 2 * 4  # optimizers, seeds, checkpoints
    rises = since_minimum(table).query("quantity == 'validation_loss' and optimizer == 'sgd'").change
    assert (rises > 0.1).all()  # an overfitting regime, or the figure shows nothing
    fig8 = run_smoke("ngd/fig8")
    misses = [json.loads((folder / "run.json").read_text())["store"]["misses"] for folder in (fig7, fig8)]
    assert min(misses) == 0 < max(misses)  # the one that ran first has computed all that the other needs
    assert pd.read_csv(fig8 / "table.csv").equals(table)


@pytest.mark.parametrize("preset", ["embedded", "paper"])
def test_fig8_has_the_settings_of_fig7(preset: str) -> None:
    first, second = (load_config(all_targets()[key], [f"preset={preset}"]) for key in ("ngd/fig7", "ngd/fig8"))
    assert task_settings(first) == task_settings(second)
    assert first.seed == second.seed


LOSSES = (1.0, 0.8, 1.0, 1.2)  # validation, minimum at the second checkpoint


def rows(llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...] = LOSSES) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"task": "m", "optimizer": name, "seed": seed, "epoch": epoch, "num_train": 100, "valid": True}
            | {"train_loss": 0.5 / epoch, "validation_loss": losses[index], "validation_accuracy": 0.5}
            | {"llc": llc[index] + 0.01 * seed, "trace": trace[index] + 0.01 * seed}
            | {"llc_raw": llc[index] - 0.5}
            | {"wbic": 50 / epoch + llc[index] * math.log(100) + 0.01 * seed}
            for name in ("sgd", "ngd")
            for seed in range(3)
            for index, epoch in enumerate((1, 2, 4, 8))
        ]
    )


UP, DOWN, HUMP = (1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0), (9.0, 2.0, 3.0, 1.0)


def test_last_epoch_is_what_the_table_up_to_there_says() -> None:
    table = rows(HUMP, UP)
    ends = last_epoch_table(table).set_index(["optimizer", "quantity", "last_epoch"])
    llc = ends.sort_index().loc[("sgd", "llc")]
    assert llc.seeds.to_dict() == {2: 0, 4: 3, 8: 3}  # at epoch 2 nothing has risen yet
    changes = [[(3 + seed / 100) / (2 + seed / 100) - 1 for seed in range(3)]]
    changes += [[(1 + seed / 100) / (2 + seed / 100) - 1 for seed in range(3)]]
    assert llc.change[[4, 8]].tolist() == pytest.approx([sum(each) / 3 for each in changes])
    assert llc.sign.tolist() == ["none", "rises", "falls"]
    one_invalid = table.assign(valid=~((table.seed == 0) & (table.epoch == 4)))
    ends = last_epoch_table(one_invalid).set_index(["optimizer", "quantity", "last_epoch"]).sort_index()
    llc = ends.loc[("sgd", "llc")]
    assert llc.seeds.to_dict() == {2: 0, 4: 2, 8: 3}
    assert llc.sign.tolist() == ["none", "none", "falls"]  # two seeds have no interval
    assert math.isnan(llc.low[4])


def test_since_minimum_starts_at_the_minimum() -> None:
    table = since_minimum(rows((9.0, *UP[1:]), DOWN))
    llc = table[table.quantity == "llc"]
    assert (llc.minimum_epoch == 2).all()
    assert (llc.checkpoints == 3).all()
    assert llc.change.iloc[0] == pytest.approx(4 / 2 - 1)
    assert llc.sampled_change.iloc[0] == pytest.approx(3.5 / 1.5 - 1)
    assert (llc.rank_correlation == 1).all()
    assert (table[table.quantity == "trace"].rank_correlation == -1).all()


@pytest.mark.parametrize(
    ("llc", "trace", "losses", "expected"),
    [
        (UP, UP, LOSSES, ["reproduced"] * 6),
        (UP, DOWN, LOSSES, ["reproduced", "reproduced", "not reproduced", *["reproduced"] * 3]),
        (DOWN, UP, LOSSES, ["reproduced", "not reproduced", "reproduced", "not reproduced", *["reproduced"] * 2]),
        # Its LLC rises up to the third checkpoint and has fallen at the last: it depends on where training ends.
        (HUMP, UP, LOSSES, ["reproduced", "undecided", "reproduced", *["not reproduced"] * 2, "reproduced"]),
        (UP, UP, (1.0, 0.8, 0.82, 0.84), ["direction only"] + ["reproduced"] * 5),
        (UP, UP, (1.0, 0.9, 0.8, 0.7), ["not reproduced"] + ["out of reach"] * 5),
    ],
)
def test_fig7_verdicts(
    judge: Judge, llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...], expected: list[str]
) -> None:
    verdicts = [result.verdict for result in judge("ngd/fig7", rows(llc, trace, losses))]
    assert verdicts == 2 * expected


def test_fig7_without_valid_estimates_judges_the_trace_alone(judge: Judge) -> None:
    table = rows(UP, UP).assign(valid=False)
    results = judge("ngd/fig7", table)
    expected = ["reproduced", "out of reach", "reproduced", "reproduced", "out of reach", "reproduced"]
    assert [result.verdict for result in results] == 2 * expected
    assert "3 of 3 seeds overfit, 0 of them with enough valid estimates" in results[1].explanation
    assert [result.verdict for result in judge("ngd/fig8", table)] == [
        "reproduced",
        "out of reach",
        "out of reach",
        "out of reach",
    ]


@pytest.mark.parametrize("key", ["ngd/fig7", "ngd/fig8"])
def test_the_plot_needs_no_valid_estimate(key: str, computed_of: Callable[..., Computed]) -> None:
    table = rows(UP, UP).assign(valid=False)
    assert all_targets()[key].load("draw")(computed_of({"table": table, "summary": since_minimum(table)}))


def test_fig8_verdicts_and_the_terms_that_explain_them(judge: Judge) -> None:
    rising = rows(tuple(10 * value for value in UP), UP)  # LLC ln n grows faster than n L falls
    assert [result.verdict for result in judge("ngd/fig8", rising)] == ["reproduced"] * 4
    falling = rows(tuple(value / 10 for value in UP), UP)
    results = judge("ngd/fig8", falling)
    expected = ["reproduced", "not reproduced", "reproduced", "not reproduced"]  # falling, wherever it ends
    assert [result.verdict for result in results] == expected
    assert results[3].value == pytest.approx(-1)
    assert "n L(w*) changes by -18.75 nats, and LLC ln n by +0.921 (" in results[3].explanation
