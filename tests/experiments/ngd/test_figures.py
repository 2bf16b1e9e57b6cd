"""ngd-fig2, fig3, fig7 and fig8 at smoke scale, and what is made of their tables."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.lab.tables import read_table
from experiments.ngd.fig3 import interpolated
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.overfitting import changes_by_last_epoch, last_epoch_table, mean_change, since_minimum


def test_matched_loss_compares_at_equal_loss() -> None:
    # Both follow llc = -10 ln(loss), NGD plus 3; at equal epochs NGD, which fits faster, is far higher.
    losses = {"sgd": [1.0, 0.5, 0.2], "ngd": [0.4, 0.1, 0.05]}
    rows = [
        (name, loss, 3 * (name == "ngd") - 10 * math.log(loss)) for name, own in losses.items() for loss in own
    ]
    table = pd.DataFrame(rows, columns=["optimizer", "train_loss", "llc"])
    table = table.assign(task="m", seed=0, valid=True, trace=1.0)
    found = matched_differences(table).set_index("quantity")
    assert found.loc["llc", "difference"] == pytest.approx(3)
    assert found.loc["llc", ["loss_low", "loss_high"]].tolist() == pytest.approx([0.2, 0.4])
    assert found.loc["trace", "difference"] == pytest.approx(0)
    apart = table.assign(train_loss=table.train_loss / 100 ** (table.optimizer == "ngd"))
    assert matched_differences(apart).difference.isna().all()


# ----------------------------- ngd-fig3 at smoke scale


def test_fig3_end_to_end(run_smoke) -> None:
    folder = run_smoke("ngd/fig3")
    table = read_table(folder, "table")
    assert table.groupby("sweep").size().to_dict() == {"alpha": 3 * 2, "epsilon": 3 * 2, "sgd": 2}
    assert table.llc.notna().equals(table.converged & table.valid)
    # The settings that both sweeps share are one and the same network.
    shared = [table[(table.sweep == sweep) & (table.value == value)] for sweep, value in SHARED.items()]
    assert shared[0].train_loss.tolist() == shared[1].train_loss.tolist()
    equal = read_table(folder, "equal_loss")
    ends = table[table.sweep != "epsilon"].groupby("seed").train_loss.max()
    for seed, own in equal.groupby("seed"):
        assert own.level.tolist() == pytest.approx([ends[seed]] * 4)
        assert (own.loss_after <= own.level + 1e-6).all()
        assert ((own.loss_before > own.level) | (own.loss_before == own.loss_after)).all()
    # Between the LLCs of the two checkpoints beside the level, as far as the logarithm of the loss is.
    to_level, to_end = (equal.loss_before / other for other in (equal.level, equal.loss_after))
    weights = to_level.map(math.log) / to_end.map(math.log)
    assert (equal.llc.notna() == equal.valid).all()
    assert weights.dropna().between(0, 1.001).all()


def test_the_llc_at_a_level_is_interpolated_in_the_logarithm_of_the_loss() -> None:
    own = {"train_loss": [0.4, 0.1], "valid": [True, True], "llc": [10.0, 20.0], "curvature_cutoff": 0.5}
    beside = pd.DataFrame(own, index=[3, 5])
    assert [interpolated(beside, loss)["llc"] for loss in (0.2, 0.4, 0.1)] == pytest.approx([15.0, 10.0, 20.0])
    assert math.isnan(interpolated(beside.assign(valid=[True, False]), 0.2).get("llc", math.nan))


SHARED = {"alpha": 0.1, "epsilon": 1e-10}


# -------------- ngd-fig7 and ngd-fig8 at smoke scale, and changes over synthetic tables


def test_fig7_and_fig8_have_one_set_of_units(run_smoke) -> None:
    fig7 = run_smoke("ngd/fig7")
    table = read_table(fig7, "table")
    assert len(table) == 2 * 2 * 4  # optimizers, seeds, checkpoints
    rises = since_minimum(table).query("quantity == 'validation_loss' and optimizer == 'sgd'").change
    assert (rises > 0.1).all()  # an overfitting regime, or the figure shows nothing
    fig8 = run_smoke("ngd/fig8")
    misses = [json.loads((folder / "run.json").read_text())["store"]["misses"] for folder in (fig7, fig8)]
    assert min(misses) == 0 < max(misses)  # the one that ran first has computed all that the other needs
    assert read_table(fig8, "table").equals(table)


@pytest.mark.parametrize("preset", ["embedded", "paper"])
def test_fig8_has_the_settings_of_fig7(preset: str) -> None:
    first, second = (load_config(all_targets()[key], [f"preset={preset}"]) for key in ("ngd/fig7", "ngd/fig8"))
    assert task_settings(first) == task_settings(second)
    assert first.seed == second.seed


LOSSES = (1.0, 0.8, 1.0, 1.2)  # validation, minimum at the second checkpoint


def overfitting_rows(
    llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...] = LOSSES
) -> pd.DataFrame:
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
    table = overfitting_rows(HUMP, UP)

    def llc_of_sgd(table: pd.DataFrame) -> pd.DataFrame:
        ends = last_epoch_table(table, changes_by_last_epoch(table))
        return ends.set_index(["optimizer", "quantity", "last_epoch"]).sort_index().loc[("sgd", "llc")]

    llc = llc_of_sgd(table)
    assert llc.seeds.to_dict() == {2: 0, 4: 3, 8: 3}  # at epoch 2 nothing has risen yet
    ratios = [[(end + seed / 100) / (2 + seed / 100) for seed in range(3)] for end in (3, 1)]
    assert llc.change[[4, 8]].tolist() == pytest.approx([math.prod(each) ** (1 / 3) - 1 for each in ratios])
    assert llc.sign.tolist() == ["none", "rises", "falls"]
    llc = llc_of_sgd(table.assign(valid=~((table.seed == 0) & (table.epoch == 4))))
    assert llc.seeds.to_dict() == {2: 0, 4: 2, 8: 3}
    assert llc.sign.tolist() == ["none", "none", "falls"]  # two seeds have no interval
    assert math.isnan(llc.low[4])


def test_a_change_is_of_logarithms_so_that_its_interval_stays_above_minus_one() -> None:
    change, interval = mean_change([-0.5, 0.5, -0.9])
    assert change == pytest.approx((0.5 * 1.5 * 0.1) ** (1 / 3) - 1)
    assert -1 < interval.low < change < interval.high
    assert (1 + interval.low) * (1 + interval.high) == pytest.approx((1 + change) ** 2)
    negative = overfitting_rows(UP, UP).assign(trace=lambda table: table.trace - 2.5)  # it has no logarithm
    assert since_minimum(negative).query("quantity == 'trace'").change.isna().all()


@pytest.mark.parametrize("key", ["ngd/fig7", "ngd/fig8"])
def test_without_valid_estimates_all_is_drawn(key: str, computed_of) -> None:
    table = overfitting_rows(UP, UP).assign(valid=False)
    assert all_targets()[key].load("draw")(computed_of({"table": table, "summary": since_minimum(table)}))
