"""lissa-fig2 at smoke scale, what its claims read off tables, and what is recorded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab.reporting import load_claims
from curvlab.lab.runs.record import read_record
from experiments.lissa.fig2 import recorded_steps

PANELS = [
    f"{prefix}{name}"
    for prefix in ("", "steps-")
    for name in ("converges", "faster-recommended", "faster-double", "closer-recommended", "closer-double")
]


def test_tables_agree_with_each_other(smoke_result) -> None:
    smoke: Path = smoke_result("lissa/fig2")
    table, between, recipes = (
        pd.read_csv(smoke / f"{name}.csv") for name in ("table", "between_steps", "recipes")
    )
    assert len(table) == 3 * 2 * 3 * len(recorded_steps(30))  # batch sizes, seeds, points
    sizes = table.groupby("batch_size").num_runs.first()
    large, recommended, small = sorted(sizes.index, reverse=True)
    assert large == 2 * recommended
    assert sizes[small] == 10
    assert (sizes[[large, recommended]] == 1).all()
    # LiSSA's first step is step_size times the gradient, whatever the batch.
    first = table[table.step == 1].pivot(index=["seed", "point"], columns="batch_size", values="pearson")
    np.testing.assert_allclose(first[large], first[small], rtol=1e-4)
    last = table[(table.step == table.step.max()) & (table.batch_size == large)]
    assert last.pearson.mean() > 0.9
    np.testing.assert_allclose(last.pearson_last, 1, rtol=1e-6)
    assert last.groupby("point").pearson.nunique().min() == 2  # seeds have batches of their own
    assert not table.overflow.any()
    diagonal = between[between.step == between.other_step]
    np.testing.assert_allclose(diagonal.pearson, 1, rtol=1e-4)
    answers = recipes[recipes.step == -1].groupby("recipe").error.max()
    assert answers["auto"] < 0.3
    assert answers["importance"] < 0.3
    ours = {entry["name"]: entry["ours"] for entry in read_record(smoke)["settings"]}
    assert ours["summary.csv:batch sizes"]["mlp-8-digits-200"] == f"{large} {recommended} {small}x10"


@pytest.mark.parametrize(
    ("task", "out_of_reach", "figure"),
    [
        ("mlp_8_digits_200", {"recipe-converges", "importance-converges"}, "figure.png"),
        ("mlp_8_digits_200_overfitted", {f"{name}-batch-sizes" for name in PANELS}, "figure_recipes.png"),
    ],
)
def test_each_task_alone_leaves_the_other_panel_out_of_reach(
    run_smoke, task: str, out_of_reach: set[str], figure: str
) -> None:
    folder = run_smoke("lissa/fig2", f"task={task}")
    found = {result.claim.id for result in load_claims(folder) if result.verdict == "out of reach"}
    assert found == out_of_reach
    assert [path.name for path in folder.glob("figure*.png")] == [figure]


def test_claims_take_overflow_for_minus_one(computed_of, judged) -> None:
    rows = [
        {"task": "net", "batch_size": size, "num_runs": 1, "seed": seed, "point": point, "step": step}
        | {name: value for name in ("pearson", "pearson_one_run", "pearson_last")}
        | {"overflow": math.isnan(value)}
        for size, value in ((20, 0.99), (10, 0.98), (1, math.nan))
        for seed in range(3)
        for point in range(4)
        for step in (1, 200, 400)
    ]
    answer = {"task": "net", "step": -1, "point": [0, 1], "diverged_at": 0, "error": [0.15, 0.25]}
    recipes = pd.concat([pd.DataFrame(answer | {"recipe": name}) for name in ("paper", "importance")])
    tables = {"table": pd.DataFrame(rows), "recipes": recipes}
    found = {result.claim.id: result for result in judged("lissa/fig2", computed_of(tables, {"seed": 0}))}
    assert found["recipe-converges-net"].verdict == "reproduced"
    assert found["importance-converges-net"].verdict == "not reproduced"  # one of two points is 0.25 off
    assert found["converges-net"].value == pytest.approx(0.98)
    assert found["steps-closer-double-net"].value == pytest.approx(0.99 + 1)
    assert found["faster-double-net"].value == pytest.approx(400)  # small batches reach no plateau above 0
    rows = [row | {"pearson": math.nan, "overflow": True} if row["batch_size"] == 10 else row for row in rows]
    tables["table"] = pd.DataFrame(rows)
    found = {result.claim.id: result for result in judged("lissa/fig2", computed_of(tables, {"seed": 0}))}
    assert found["converges-net"].value == -1
    assert "12 with |B| = 10" in found["converges-net"].explanation


def test_nothing_asks_for_the_spectrum_where_all_settings_are_given(run_smoke) -> None:
    given = ["task=mlp_8_digits_200", "damping=0.2", "step_size=0.05", "batch_size=20", "num_seeds=2"]
    folder: Path = run_smoke("lissa/fig2", *given)
    row = pd.read_csv(folder / "summary.csv").iloc[0]
    assert math.isnan(row["lambda_max"])
    assert math.isnan(row["tr(G)"])
    assert (row["step size"], row["damping"], row["batch sizes"]) == (0.05, 0.2, "40 20 2x10")
    units = [unit["name"] for unit in read_record(folder)["units"]]
    assert "lissa/fig2_scores" in units
    assert not {"spectrum/trace", "spectrum/largest"} & set(units)


def test_recorded_steps_are_first_ones_and_equal_ones() -> None:
    steps = recorded_steps(1000)
    assert steps[:6] == [1, 2, 5, 10, 20, 40]
    assert steps[-1] == 1000
    assert set(np.diff(steps[5:])) == {40}
    assert recorded_steps(10) == list(range(1, 11))
