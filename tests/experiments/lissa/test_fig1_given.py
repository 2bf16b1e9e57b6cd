"""lissa-fig1: settings that a config gives, and the larger epsilon."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab.runs.record import read_record
from experiments.lissa.fig1.larger_epsilon import COLUMNS

GIVEN = [
    "damping=0.2",
    "lissa.step_size=0.05",
    "lissa.batch_size=30",
    "lissa.num_steps=12",
    "exact_points=0",
    "measured.safety=3",
]


def test_lambda_max_is_not_measured_where_all_settings_are_given(run_smoke) -> None:
    folder: Path = run_smoke("lissa/fig1", *GIVEN)
    row = pd.read_csv(folder / "summary.csv").iloc[0]
    assert math.isnan(row["lambda_max"])
    assert (row["damping"], row["step size"], row["batch size"], row["steps"]) == (0.2, 0.05, 30, 12)
    # App. B.2: C tr / (1/η - λ), which for Corollary 1's step size is C tr / lambda_max.
    needed = row["C measured, twice"] * row["tr(G)"] / (1 / 0.05 - 0.2)
    assert row["batch size with it"] == math.ceil(needed)
    units = [unit["name"] for unit in read_record(folder)["units"]]
    assert "spectrum/trace" in units
    assert "spectrum" not in units
    measured = pd.read_csv(run_smoke("lissa/fig1") / "summary.csv").iloc[0]
    assert row["tr(G)"] == measured["tr(G)"]  # of the same probes


def test_with_one_epsilon_the_larger_is_the_other(run_smoke) -> None:
    """Its rows are those of C = 2, but for rounding: the columns of a product are computed together."""
    folder: Path = run_smoke("lissa/fig1", "larger.epsilon=1e-8")
    own = pd.read_csv(folder / "larger_epsilon.csv")
    assert own.columns.tolist() == COLUMNS
    table = pd.read_csv(folder / "table.csv")
    expected = table[(table.constant == "C = 2") & (table.position < 2)].reset_index(drop=True)
    assert len(own) == 2 * 2  # points x seeds
    same = ["task", "position", "seed", "lissa_pbrf_case", "lissa_overflow", "pbrf_overflow", "parted_step"]
    pd.testing.assert_frame_equal(own[same], expected[same])
    for name in ("lissa_pbrf_pearson", "lissa_length"):
        np.testing.assert_allclose(own[name], expected[name], rtol=1e-3)


def test_a_large_epsilon_leaves_the_quadratic_range(run_smoke) -> None:
    own = pd.read_csv(run_smoke("lissa/fig1", "larger.epsilon=30") / "larger_epsilon.csv")
    assert (own.parted_step > 0).any()
    assert (own.lissa_length <= 1).all()  # while LiSSA is no longer than a solution


def rows(step: int, length: float, epsilon: float = 1e-2) -> pd.DataFrame:
    """Panels large and apart of three seeds and points."""
    places = {"position": np.repeat([0, 1, 2], 3), "seed": np.tile([0, 1, 2], 3)}
    more = {"lissa_pbrf_case": "apart", "lissa_pbrf_pearson": 0.1, "lissa_length": 0.5, "sgd_length": 0.5}
    flags = {"lissa_overflow": False, "pbrf_overflow": False, "parted_step": step, "length_at_parting": length}
    return pd.DataFrame({"task": "net", "epsilon": epsilon} | places | more | flags)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (rows(5, 0.4), "reproduced"),
        (rows(5, 30.0), "not reproduced"),
        (rows(0, math.nan), "out of reach"),
        (rows(5, 0.4).assign(lissa_pbrf_case="agree"), "out of reach"),
        (rows(5, 0.4).iloc[:0], "out of reach"),
    ],
)
def test_the_cause_is_judged_at_the_larger_epsilon_too(computed_of, judged, found, verdict) -> None:
    panels = rows(0, math.nan).assign(constant="C = 2", lissa_pbrf_slope=0.1, same_batches_pearson=0.1)
    tables = {
        "table": panels.assign(same_batches_case="apart"),
        "summary": pd.DataFrame({"task": ["net"], "regime": ["fitted"]}),
        "larger_epsilon": found,
    }
    computed = computed_of(tables, {"seed": 0, "pbrf": {"epsilon": 1e-8}})
    verdicts = {result.claim.id: result.verdict for result in judged("lissa/fig1", computed)}
    assert verdicts["cause-net"] == "out of reach"
    assert verdicts["cause-larger-net"] == verdict
