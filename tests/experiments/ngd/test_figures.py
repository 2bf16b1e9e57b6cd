"""ngd-fig2, fig3, fig7 and fig8 at smoke scale, and their verdicts."""

from __future__ import annotations

import json
import math
from itertools import product

import pandas as pd
import pytest

from curvlab.lab import all_targets, load_config, t_interval, task_settings
from curvlab.lab.tables import read_table
from experiments.ngd.fig3 import equal_loss_trends, interpolated, summary_table, trend_table
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


def test_fig2_verdicts(results_of) -> None:
    table = pd.DataFrame(product(("sgd", "ngd"), range(3), (1, 2, 4)), columns=["optimizer", "seed", "epoch"])
    ngd = table.optimizer == "ngd"
    table = table.assign(task="m", train_loss=1 / table.epoch, valid=True, llc=10.0 + table.seed / 10 + 5 * ngd)
    table["llc_raw"] = (10.0 + table.seed / 10) * (1 - (ngd & (table.epoch == 4)) / 2)
    table["trace"] = (100.0 + table.seed) / table.epoch * (1 - ngd / 2)

    def results(table: pd.DataFrame) -> dict:
        return results_of("ngd/fig2", {"table": table, "matched": matched_differences(table)})

    found = results(table)
    fail = {"trace-higher", "llc-higher-raw", "llc-plateaus-ngd-raw"}
    hold = {"llc-higher", "llc-plateaus-sgd", "llc-plateaus-ngd", "llc-plateaus-sgd-raw", "trace-decreases"}
    expected = dict.fromkeys(hold, "reproduced") | dict.fromkeys(fail, "not reproduced")
    assert {name: result.verdict for name, result in found.items()} == expected
    assert found["trace-higher"].value == pytest.approx(-0.5)
    for valid, plateau in ((False, "out of reach"), (ngd, "reproduced")):
        found = results(table.assign(valid=valid))
        assert found["llc-higher"].verdict == found["llc-plateaus-sgd"].verdict == "out of reach"
        assert found["llc-plateaus-ngd"].verdict == plateau
        assert found["trace-decreases"].verdict == "reproduced"


# ----------------------------- ngd-fig3 at smoke scale, and its claims on synthetic tables
@pytest.fixture
def judge(results_of, computed_of):
    """Return a function that judges a made-up table, and draws it."""

    def judge(table: pd.DataFrame) -> dict:
        equal = at_equal_loss(table)
        tables = {"table": table, "trends": trend_table(table)}
        tables |= {"equal_loss": equal, "equal_loss_trends": equal_loss_trends(equal)}
        all_targets()["ngd/fig3"].load("draw")(computed_of(tables))
        return results_of("ngd/fig3", tables)

    return judge


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


def at_equal_loss(table: pd.DataFrame) -> pd.DataFrame:
    """Return the sweep of alpha with half of its LLCs, at one loss."""
    own = table[table.sweep != "epsilon"]
    return own.assign(level=0.2, llc=own.llc / 2)[["task", "value", "seed", "level", "valid", "llc"]]


SHARED = {"alpha": 0.1, "epsilon": 1e-10}


def rows(slope: float, *, epsilon_slope: float = -1.0, lost: int = 0) -> pd.DataFrame:
    """Return LLCs that change by `slope` a decade, towards SGD's 10; the first `lost` values have none."""
    values = {"alpha": [0.01, 0.1, 1.0, 10.0], "epsilon": [1e-6, 1e-4, 1e-2, 1.0]}
    cells = [("sgd", math.nan, 10.0, False)]
    for sweep, decades in (("alpha", slope), ("epsilon", epsilon_slope)):
        last = math.log10(values[sweep][-1])
        cells += [
            (sweep, value, 10 + decades * (math.log10(value) - last), index < lost)
            for index, value in enumerate(values[sweep])
        ]
    return pd.DataFrame(
        [
            {"task": "m", "sweep": sweep, "value": value, "seed": seed, "train_loss": 1 / llc, "estimate": llc}
            | {"validation_loss": 0.2, "converged": not none, "valid": True}
            | {"problem": "not mixed" if none else None}
            | {"llc": math.nan if none else llc + 0.01 * seed, "llc_raw": llc - 2, "descent": 2.0}
            for sweep, value, llc, none in cells
            for seed in range(3)
        ]
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (rows(-1.0), ["reproduced"] * 7),
        (rows(+1.0), ["not reproduced"] * 2 + ["reproduced"] * 4 + ["not reproduced"]),
        (rows(-1.0, lost=1), ["reproduced"] * 7),
        (rows(-1.0, lost=2), ["out of reach", "reproduced", "reproduced"] * 2 + ["out of reach"]),
        (rows(-1.0, lost=4), ["out of reach"] * 7),
    ],
)
def test_fig3_verdicts(judge, table: pd.DataFrame, expected: list[str]) -> None:
    results = judge(table)
    assert [result.verdict for name, result in results.items() if "-raw" not in name] == expected
    raw = [result.verdict for name, result in results.items() if "-raw" in name]
    assert raw == expected[:6]  # lower by 2, all


def test_a_rise_over_part_of_the_sweep_is_named(judge) -> None:
    table = rows(-1.0)
    last = (table.sweep == "epsilon") & (table.value == 1.0)
    table.loc[last, "llc"] += 4  # from 12.0 at 1e-2 to 14.0
    results = judge(table)
    assert results["llc-falls-with-epsilon"].verdict == "reproduced"
    rise = results["llc-never-rises-with-epsilon"]
    assert rise.verdict == "not reproduced"
    assert rise.value == pytest.approx(14.01 / 12.01, rel=1e-4)
    assert "the step from epsilon = 0.01 to 1" in rise.explanation


def test_a_step_that_varies_more_than_the_largest_leaves_a_rise_open(judge) -> None:
    table = rows(-1.0)
    last = (table.sweep == "alpha") & (table.value == 10.0)
    table.loc[last, "llc"] += table[last].seed - 1.0  # its mean falls most of all, seed 2's not at all
    rise = judge(table)["llc-never-rises-with-alpha"]
    steps = table[table.sweep == "alpha"].pivot_table(index="seed", columns="value", values="llc")
    logs = steps.map(math.log).diff(axis="columns").iloc[:, 1:]
    ends = [t_interval(logs[value], confidence=1 - 0.05 / 3) for value in logs]
    assert rise.verdict == "undecided"
    assert rise.value == pytest.approx(math.exp(logs[0.1].mean()))
    low, high = math.log(rise.interval.low), math.log(rise.interval.high)
    assert (low, high) == pytest.approx((max(end.low for end in ends), ends[-1].high))
    assert "Its upper end is that of the step from alpha = 1 to 10" in rise.explanation
    assert "the largest mean that of 0.01 to 0.1" in rise.explanation


def test_a_grid_that_ends_above_sgd_does_not_approach_it(judge) -> None:
    table = rows(-1.0)
    table.loc[table.sweep == "sgd", "llc"] *= 0.8
    found = judge(table)["llc-approaches-sgd-alpha"]
    assert (found.verdict, found.value) == ("not reproduced", pytest.approx(1.25))
    assert "At the largest alpha, 10, NGD is not yet SGD" in found.explanation


def test_trends_and_summary_count_only_llcs(judge) -> None:
    table = rows(-1.0, lost=1)
    trends = trend_table(table)
    assert trends["values"].tolist() == [3] * 6
    assert trends[trends.sweep == "alpha"].rank_correlation.to_numpy() == pytest.approx(-1)
    summary = summary_table(table).set_index(["sweep", "value"])
    assert summary.loc[("alpha", 0.01), ["seeds", "converged", "llcs"]].tolist() == [3, 0, 0]
    assert summary.loc[("alpha", 0.01), ["llc", "llc_raw"]].isna().all()
    assert summary.loc[("alpha", 1.0), ["llc", "llc_raw", "descent"]].tolist() == pytest.approx([11.01, 9.0, 2.0])
    assert summary.loc[("alpha", 0.01), "problems"] == "not mixed"
    first = next(iter(judge(rows(1.0, lost=1)).values()))
    assert "3 of 12 estimates are left out (at 0.01)" in first.explanation


# -------------- ngd-fig7 and ngd-fig8 at smoke scale, and their claims on synthetic tables
@pytest.fixture
def judge_key(results_of):
    """Return a function that judges a made-up table."""
    return lambda key, table: results_of(key, {"table": table, "summary": since_minimum(table)})


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


def test_why_the_sign_is_out_of_reach_is_said(judge_key) -> None:
    table = overfitting_rows(UP, UP)
    late = (table.epoch < 4) | (table.seed == 0)  # of two seeds the last does not count
    for valid, said in (
        (late, "Where training ends it needs two seeds with a change that counts; there are 1."),
        (table.epoch != 4, "Had training ended earlier, no seed would have a change that counts."),
    ):
        assert judge_key("ngd/fig7", table.assign(valid=valid))["llc-sign-sgd"].explanation == said


def test_since_minimum_starts_at_the_minimum() -> None:
    table = since_minimum(overfitting_rows((9.0, *UP[1:]), DOWN))
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
def test_fig7_verdicts(judge_key, llc: tuple, trace: tuple, losses: tuple, expected: list[str]) -> None:
    found = judge_key("ngd/fig7", overfitting_rows(llc, trace, losses))
    assert [result.verdict for result in found.values()] == 2 * expected


def test_without_valid_estimates_the_trace_alone_is_judged_and_all_is_drawn(judge_key, computed_of) -> None:
    table = overfitting_rows(UP, UP).assign(valid=False)
    found = {key: list(judge_key(key, table).values()) for key in ("ngd/fig7", "ngd/fig8")}
    expected = ["reproduced", "out of reach", "reproduced", "reproduced", "out of reach", "reproduced"]
    assert [result.verdict for result in found["ngd/fig7"]] == 2 * expected
    assert "3 of 3 seeds overfit, 0 of them with enough valid estimates" in found["ngd/fig7"][1].explanation
    # Of every estimate, as the paper counts them, the WBIC falls from 34 to 25.
    expected = ["reproduced", *["out of reach"] * 3, "not reproduced"]
    assert [result.verdict for result in found["ngd/fig8"]] == expected
    for key in found:
        assert all_targets()[key].load("draw")(computed_of({"table": table, "summary": since_minimum(table)}))


def test_fig8_verdicts_and_the_terms_that_explain_them(judge_key) -> None:
    rising = overfitting_rows(tuple(10 * value for value in UP), UP)  # LLC ln n grows faster than n L falls
    assert [result.verdict for result in judge_key("ngd/fig8", rising).values()] == ["reproduced"] * 5
    falling = overfitting_rows(tuple(value / 10 for value in UP), UP)
    results = list(judge_key("ngd/fig8", falling).values())
    expected = ["reproduced", "not reproduced", "reproduced", *["not reproduced"] * 2]  # falling, wherever it ends
    assert [result.verdict for result in results] == expected
    assert results[3].value == pytest.approx(-1)
    assert "n L(w*) changes by -18.75 nats, and LLC ln n by +0.921 (" in results[3].explanation
