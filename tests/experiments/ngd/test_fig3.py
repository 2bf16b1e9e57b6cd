"""ngd-fig3 at smoke scale, and its claims on synthetic tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed, all_targets
from experiments.ngd.fig3 import equal_loss_trends, interpolated, summary_table, trend_table

Judge = Callable[[pd.DataFrame], list[ClaimResult]]


@pytest.fixture
def judge(computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]) -> Judge:
    """Return a function that judges a made-up table, and draws it."""

    def judge(table: pd.DataFrame) -> list[ClaimResult]:
        equal = at_equal_loss(table)
        computed = computed_of(
            {"table": table, "trends": trend_table(table)}
            | {"equal_loss": equal, "equal_loss_trends": equal_loss_trends(equal)}
        )
        all_targets()["ngd/fig3"].load("draw")(computed)
        return judged("ngd/fig3", computed)

    return judge


def test_fig3_end_to_end(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("ngd/fig3")
    table = pd.read_csv(folder / "table.csv")
    assert table.groupby("sweep").size().to_dict() == {"alpha": 3 * 2, "epsilon": 3 * 2, "sgd": 2}
    assert table.llc.notna().equals(table.converged & table.valid)
    # The settings that both sweeps share are one and the same network.
    shared = [table[(table.sweep == sweep) & (table.value == value)] for sweep, value in SHARED.items()]
    assert shared[0].train_loss.tolist() == shared[1].train_loss.tolist()
    equal = pd.read_csv(folder / "equal_loss.csv")
    ends = table[table.sweep != "epsilon"].groupby("seed").train_loss.max()
    for seed, own in equal.groupby("seed"):
        assert own.level.tolist() == pytest.approx([ends[seed]] * 4)
        assert (own.loss_after <= own.level + 1e-6).all()
        assert ((own.loss_before > own.level) | (own.loss_before == own.loss_after)).all()
    # Between the LLCs of the two checkpoints beside the level, as far as the logarithm of the loss is.
    weights = (equal.loss_before / equal.level).map(math.log) / (equal.loss_before / equal.loss_after).map(
        math.log
    )
    assert (equal.llc.notna() == equal.valid).all()
    assert weights.dropna().between(0, 1.001).all()


def test_the_llc_at_a_level_is_interpolated_in_the_logarithm_of_the_loss() -> None:
    beside = pd.DataFrame(
        {"train_loss": [0.4, 0.1], "valid": [True, True], "llc": [10.0, 20.0], "curvature_cutoff": 0.5},
        index=[3, 5],
    )
    assert interpolated(beside, 0.2)["llc"] == pytest.approx(15.0)
    assert interpolated(beside, 0.4)["llc"] == pytest.approx(10.0)
    assert interpolated(beside, 0.1)["llc"] == pytest.approx(20.0)
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
            {
                "task": "m",
                "sweep": sweep,
                "value": value,
                "seed": seed,
                "train_loss": 1 / llc,
                "validation_loss": 0.2,
            }
            | {"converged": not none, "valid": True, "estimate": llc, "problem": "not mixed" if none else None}
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
def test_fig3_verdicts(judge: Judge, table: pd.DataFrame, expected: list[str]) -> None:
    results = judge(table)
    assert [result.verdict for result in results if "-raw-" not in result.claim.id] == expected
    assert [result.verdict for result in results if "-raw-" in result.claim.id] == expected[:6]  # lower by 2, all


def test_a_rise_over_part_of_the_sweep_is_named(judge: Judge) -> None:
    table = rows(-1.0)
    last = (table.sweep == "epsilon") & (table.value == 1.0)
    table.loc[last, "llc"] += 4  # from 12.0 at 1e-2 to 14.0
    results = {result.claim.id: result for result in judge(table)}
    assert results["llc-falls-with-epsilon-m"].verdict == "reproduced"
    rise = results["llc-never-rises-with-epsilon-m"]
    assert rise.verdict == "not reproduced"
    assert rise.value == pytest.approx(14.01 / 12.01, rel=1e-4)
    assert "From epsilon = 0.01 to 1" in rise.explanation
    assert rise.interval.kind.startswith(f"t {100 * (1 - 0.05 / 3):g} %")


def test_a_grid_that_ends_above_sgd_does_not_approach_it(judge: Judge) -> None:
    table = rows(-1.0)
    table.loc[table.sweep == "sgd", "llc"] *= 0.8
    results = {result.claim.id: result for result in judge(table)}
    assert results["llc-approaches-sgd-alpha-m"].verdict == "not reproduced"
    assert results["llc-approaches-sgd-alpha-m"].value == pytest.approx(1.25)
    assert "At the largest alpha, 10, NGD is not yet SGD" in results["llc-approaches-sgd-alpha-m"].explanation


def test_trends_and_summary_count_only_llcs(judge: Judge) -> None:
    table = rows(-1.0, lost=1)
    trends = trend_table(table)
    assert trends["values"].tolist() == [3] * 6
    assert (trends[trends.sweep == "alpha"].rank_correlation == -1).all()
    summary = summary_table(table).set_index(["sweep", "value"])
    assert summary.loc[("alpha", 0.01), ["seeds", "converged", "llcs"]].tolist() == [3, 0, 0]
    assert math.isnan(summary.loc[("alpha", 0.01), "llc"])
    assert math.isnan(summary.loc[("alpha", 0.01), "llc_raw"])
    assert summary.loc[("alpha", 1.0), ["llc", "llc_raw", "descent"]].tolist() == pytest.approx([11.01, 9.0, 2.0])
    assert summary.loc[("alpha", 0.01), "problems"] == "not mixed"
    explanation = judge(rows(1.0, lost=1))[0].explanation
    assert "3 of 12 estimates are left out (at 0.01)" in explanation
