"""lissa-fig2 end to end at smoke scale, and its exact solutions against dense ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import load_claims
from curvlab.runs.record import read_record
from experiments.lissa.fig2 import TARGET
from experiments.lissa.fig2.convergence import recorded_steps
from experiments.target.execution import draw_target


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/fig2")


def test_results_are_complete_and_consistent(smoke: Path) -> None:
    table, between, recipes = (
        pd.read_csv(smoke / f"{name}.csv") for name in ("table", "between_steps", "recipes")
    )
    assert len(table) == 3 * 3 * len(recorded_steps(30))  # batch sizes, points
    sizes = table.groupby("batch_size").num_runs.first()
    large, recommended, small = sorted(sizes.index, reverse=True)
    assert large == 2 * recommended
    assert sizes[small] == 10
    assert (sizes[[large, recommended]] == 1).all()
    # LiSSA's first step is step_size times the gradient, whatever the batch.
    first = table[table.step == 1].pivot(index="point", columns="batch_size", values="pearson")
    np.testing.assert_allclose(first[large], first[small], rtol=1e-4)
    last = table[(table.step == table.step.max()) & (table.batch_size == large)]
    assert last.pearson.mean() > 0.9
    diagonal = between[between.step == between.other_step]
    np.testing.assert_allclose(diagonal.pearson, 1, rtol=1e-4)
    answers = recipes[recipes.step == -1].groupby("recipe").error.max()
    assert answers["auto"] < 0.3
    assert {result.claim.id for result in load_claims(smoke)} == {
        "converges-mlp-8-digits-200",
        "faster-recommended-mlp-8-digits-200",
        "faster-double-mlp-8-digits-200",
        "recipe-converges-mlp-8-digits-200-overfitted",
    }
    ours = {entry["name"]: entry["ours"] for entry in read_record(smoke)["settings"]}
    assert ours["summary.csv:batch sizes"]["mlp-8-digits-200"] == f"{large} {recommended} {small}x10"


def test_figures_are_drawn_again_from_the_tables_alone(smoke: Path) -> None:
    before = {path.name: path.read_bytes() for path in smoke.glob("figure*.png")}
    assert set(before) == {"figure.png", "figure_recipes.png"}
    draw_target(TARGET, smoke)
    assert {path.name: path.read_bytes() for path in smoke.glob("figure*.png")} == before


@pytest.mark.parametrize(
    ("task", "out_of_reach", "figure"),
    [
        ("mlp_8_digits_200", {"recipe-converges-recipes"}, "figure.png"),
        (
            "mlp_8_digits_200_overfitted",
            {f"{name}-batch-sizes" for name in ("converges", "faster-recommended", "faster-double")},
            "figure_recipes.png",
        ),
    ],
)
def test_each_task_alone_leaves_the_other_panel_out_of_reach(
    run_smoke, task: str, out_of_reach: set[str], figure: str
) -> None:
    folder = run_smoke("lissa/fig2", f"task={task}")
    found = {result.claim.id for result in load_claims(folder) if result.verdict == "out of reach"}
    assert found == out_of_reach
    assert [path.name for path in folder.glob("figure*.png")] == [figure]


def test_recorded_steps_are_first_ones_and_equal_ones() -> None:
    steps = recorded_steps(1000)
    assert steps[:6] == [1, 2, 5, 10, 20, 40]
    assert steps[-1] == 1000
    assert set(np.diff(steps[5:])) == {40}
    assert recorded_steps(10) == list(range(1, 11))
