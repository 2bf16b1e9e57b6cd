"""ngd-fig3 at smoke scale, and its claims on synthetic tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from curvlab.reporting import load_claims
from experiments.ngd.fig3_claims import judge_claims, summary_table, trend_table
from experiments.ngd.fig3_plot import draw
from experiments.ngd.fig3_smoothing import main as fig3


def test_fig3_end_to_end(run_target: Callable[..., Path]) -> None:
    folder = run_target(fig3, "ngd/fig3_smoothing") / "ngd" / "fig3" / "smoke"
    table = pd.read_csv(folder / "table.csv")
    assert table.groupby("sweep").size().to_dict() == {"alpha": 3 * 2, "epsilon": 3 * 2, "sgd": 2}
    assert table.llc.notna().equals(table.converged & table.valid)
    # The settings that both sweeps share are one and the same network.
    shared = [table[(table.sweep == sweep) & (table.value == value)] for sweep, value in SHARED.items()]
    assert shared[0].train_loss.tolist() == shared[1].train_loss.tolist()
    assert (folder / "figure.png").is_file()
    assert len(load_claims(folder)) == 4


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
            {"sweep": sweep, "value": value, "seed": seed, "train_loss": 1 / llc, "validation_loss": 0.2}
            | {"converged": not none, "valid": True, "estimate": llc, "problem": "not mixed" if none else None}
            | {"llc": math.nan if none else llc + 0.01 * seed}
            for sweep, value, llc, none in cells
            for seed in range(3)
        ]
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (rows(-1.0), ["reproduced", "reproduced", "reproduced", "reproduced"]),
        (rows(+1.0), ["not reproduced", "reproduced", "reproduced", "reproduced"]),
        (rows(-1.0, lost=1), ["reproduced", "reproduced", "reproduced", "reproduced"]),
        (rows(-1.0, lost=2), ["out of reach", "reproduced", "out of reach", "reproduced"]),
        (rows(-1.0, lost=4), ["out of reach"] * 4),
    ],
)
def test_fig3_verdicts(table: pd.DataFrame, expected: list[str]) -> None:
    results = judge_claims(table, trend_table(table))
    assert [result.verdict for result in results] == expected
    draw(table)


def test_a_grid_that_ends_above_sgd_does_not_approach_it() -> None:
    table = rows(-1.0)
    table.loc[table.sweep == "sgd", "llc"] *= 0.8
    results = {result.claim.id: result for result in judge_claims(table, trend_table(table))}
    assert results["llc-approaches-sgd-alpha"].verdict == "not reproduced"
    assert results["llc-approaches-sgd-alpha"].value == pytest.approx(1.25)
    assert "At the largest alpha, 10, NGD is not yet SGD" in results["llc-approaches-sgd-alpha"].explanation


def test_trends_and_summary_count_only_llcs() -> None:
    table = rows(-1.0, lost=1)
    trends = trend_table(table)
    assert trends["values"].tolist() == [3] * 6
    assert (trends[trends.sweep == "alpha"].rank_correlation == -1).all()
    summary = summary_table(table).set_index(["sweep", "value"])
    assert summary.loc[("alpha", 0.01), ["seeds", "converged", "llcs"]].tolist() == [3, 0, 0]
    assert math.isnan(summary.loc[("alpha", 0.01), "llc"])
    assert summary.loc[("alpha", 0.01), "problems"] == "not mixed"
    explanation = judge_claims(rows(1.0, lost=1), trend_table(rows(1.0, lost=1)))[0].explanation
    assert "3 of 12 estimates are left out (at 0.01)" in explanation
