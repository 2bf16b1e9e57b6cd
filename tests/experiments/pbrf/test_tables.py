"""pbrf-tab4 to tab8 end to end at smoke scale; their claims are in test_judges."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.influence.retraining import GAPS
from curvlab.lab import Computed, all_targets, load_config, start, task_settings
from curvlab.lab.tables import read_table
from experiments.pbrf.gaps import MOVES
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import Decomposition
from experiments.pbrf.solvers import SCALES

from .dense_mlp import dense_hessian


# --- pbrf-tab4 to tab8 end to end at smoke scale, from one store, since they share their units of work
@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("pbrf/tab5")


def test_results_are_complete_and_agree_with_each_other(smoke: Path) -> None:
    assert {path.name.removesuffix(".bz2") for path in smoke.iterdir()} == {
        "table.csv", "points.csv", "networks.csv", "figure.png", "figure_more.png", "claims.json", "run.json"
    }  # fmt: skip
    table, points = read_table(smoke, "table"), read_table(smoke, "points")
    assert len(points) == 2 * 4 * (len(GAPS) + len(MOVES))  # tasks x points x (gaps and distances from θ^s)
    for _, row in table.iterrows():
        own = points[points.task == row.task]
        for gap in GAPS:
            values = own[own.gap == gap]
            np.testing.assert_allclose(row[f"{gap} per_example mean"], values.per_example.mean(), rtol=1e-4)
            np.testing.assert_allclose(values.total, values.per_example * row.N**0.5, rtol=1e-4)
    assert (table.residual < 1e-6).all()
    assert table.learned.all()
    assert (table["train loss"] < table["constant loss"]).all()
    record = json.loads((smoke / "run.json").read_text())
    assert {"name": "num_points", "ours": 4, "paper": 20} in record["settings"]


def test_logistic_regression_is_at_its_optimum_and_an_mlp_is_not(smoke: Path) -> None:
    table = read_table(smoke, "table").set_index("task")
    logistic, mlp = table.loc["logistic-diabetes-progression"], table.loc["mlp-4-diabetes-60"]
    assert logistic["gradient norm"] < 1e-6 < mlp["gradient norm"]
    for gap in ("warm_start", "non_convergence", "solver"):  # same optimum; same minimum; exact
        assert logistic[f"{gap} per_example mean"] < 1e-4 < mlp[f"{gap} per_example mean"]


def test_a_second_run_computes_nothing(smoke: Path, run_smoke) -> None:
    before = {path.name: path.read_bytes() for path in smoke.iterdir() if path.name != "run.json"}
    again = run_smoke("pbrf/tab5", "tracker=none")
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.name != "run.json"} == before
    assert json.loads((again / "run.json").read_text())["store"]["misses"] == 0


def test_only_the_solver_error_differs_from_table_5(smoke: Path, run_smoke) -> None:
    other = read_table(smoke, "points")
    folder = run_smoke("pbrf/tab4", "seeds=[0]", drawn=False)
    points = read_table(folder, "points")
    other = other[other.task == "mlp-4-diabetes-60"].reset_index(drop=True)
    same = ~points.gap.isin(["solver", "moved"])
    pd.testing.assert_frame_equal(points[same], other[same])
    assert not np.allclose(points[~same].per_example, other[~same].per_example, rtol=1e-3)
    curvatures = read_table(folder, "curvatures")
    own = curvatures[~curvatures.definite & (curvatures.estimate == "exact")]
    by_matrix = own.groupby("curvature").solver.mean()
    np.testing.assert_allclose(by_matrix.hessian, points[points.gap == "solver"].per_example.mean(), rtol=1e-3)
    np.testing.assert_allclose(by_matrix.gauss_newton, other[other.gap == "solver"].per_example.mean(), rtol=1e-3)
    table = read_table(folder, "table").iloc[0]
    (definite,) = curvatures[curvatures.definite].damping.unique()
    assert table["smallest eigenvalue"] < -table["λ"]
    assert definite > -table["smallest eigenvalue"]
    without = run_smoke("pbrf/tab4", "hessian_seeds=[1]")  # seed 0 by LiSSA alone
    points, curvatures = (read_table(without, name) for name in ("points", "curvatures"))
    missing = points.per_example.isna()
    assert set(points[missing].seed) == {0}
    assert set(points[missing].gap) == {"solver", "moved"}
    assert points[~missing & (points.seed == 0)].per_example.tolist() == other[same].per_example.tolist()
    exact = curvatures[(curvatures.estimate == "exact") & (curvatures.curvature == "hessian")]
    assert set(exact.seed) == {1}
    assert set(curvatures.seed) == {0, 1}
    assert read_table(without, "table").iloc[0]["solver per_example mean"] > 0


def test_eigenvalues_are_those_of_the_dense_hessian(run_smoke, tmp_path: Path) -> None:
    folder = run_smoke("pbrf/tab4", "seeds=[0]", drawn=False)
    table, store = read_table(folder, "table").iloc[0], folder.parents[3] / "store"
    settings = ["preset=smoke", "seeds=[0]", "tracker=none", "progress=false", f"store.root={store}"]
    cfg = load_config(all_targets()["pbrf/tab4"], [*settings, f"results.root={tmp_path}"])
    with start(cfg, key="pbrf/tab4", title="") as run:
        ((name, task),) = task_settings(cfg).items()
        network = load_network(run, name, task, seed=0)
        at_one = Decomposition(network, 4).with_damping(1.0).hessian_spectrum()
    dense, _ = dense_hessian(network.model, network.train)
    eigenvalues, damping = torch.linalg.eigvalsh(dense), task.damping
    assert table["smallest eigenvalue"] == pytest.approx(float(eigenvalues.min()), rel=1e-6)
    assert table["eigenvalues below -λ"] == int((eigenvalues < -damping).sum())
    assert table["min |μ + λ|"] == pytest.approx(float((eigenvalues + damping).abs().min()), rel=1e-4)
    assert at_one["num_below"] == int((eigenvalues < -1).sum())


def test_a_part_of_the_training_set_stands_for_all_of_it(smoke: Path, run_smoke) -> None:
    whole = read_table(smoke, "table").set_index("task").loc["mlp-4-diabetes-60"]
    part = read_table(run_smoke("pbrf/tab5", "gap_examples=50", drawn=False), "table").set_index("task")
    found = part.loc["mlp-4-diabetes-60"]
    for gap in GAPS:
        ratio = found[f"{gap} total mean"] / found[f"{gap} per_example mean"]
        assert ratio == pytest.approx(found.N**0.5, rel=1e-4)
        assert found[f"{gap} per_example mean"] == pytest.approx(whole[f"{gap} per_example mean"], rel=0.5)


# ------------------------------------------------------------------ tab6 to tab8
EXPLAINED = ["carried_on", "small_weight", "linearised_minimum"]
RESPONSES = {
    "tab6": ["cold", "warm", "proximal_bregman", "linearised", *EXPLAINED],
    "tab7": ["cold", "warm", "proximal_bregman", "linearised", *EXPLAINED],
    "tab8": ["two_stage", "slow_two_stage", "warm", "proximal_bregman"],
}


@pytest.fixture(scope="module")
def folders(run_smoke) -> dict[str, Path]:
    return {item: run_smoke(f"pbrf/{item}") for item in RESPONSES}


@pytest.mark.parametrize("item", RESPONSES)
def test_tables_are_complete_and_agree_with_each_other(folders: dict[str, Path], item: str) -> None:
    names = ("table", "correlations")
    # Only of points that came there, in as many seeds as have two of them.
    table, found = (Computed.of(folders[item])[name].query("response != 'minimum'") for name in names)
    curvatures = {"tab6": ["gauss_newton"], "tab7": ["hessian"], "tab8": ["hessian", "gauss_newton"]}[item]
    assert table[table.estimate == "exact"].response.tolist() == RESPONSES[item] * len(curvatures)
    assert table.estimate.nunique() == 2 + len(SCALES)
    assert found.value.dropna().between(-1, 1).all()
    keys = ["curvature", "estimate", "response"]
    judged = found[(found.coefficient == "pearson") & (found.way == "over_test")]
    means = judged.groupby(keys, sort=False).value.agg(lambda own: own.mean(skipna=False))
    np.testing.assert_allclose(
        table.set_index(keys)["pearson over_test"],
        means.loc[list(table[keys].itertuples(index=False, name=None))],
        rtol=1e-4,
    )
    exact = judged[judged.estimate == "exact"]
    assert (exact.low <= exact.value).all()
    assert (exact.value <= exact.high).all()


def test_what_two_tables_share_is_the_same(folders: dict[str, Path]) -> None:
    seventh, eighth = (Computed.of(folders[item])["correlations"] for item in ("tab7", "tab8"))
    key = ["seed", "estimate", "response", "coefficient", "way"]
    both = seventh.merge(eighth[eighth.curvature == "hessian"], on=key)
    assert len(both) == 2 * (2 + len(SCALES)) * 2 * 2 * 3  # warm and PBRF
    np.testing.assert_allclose(both.value_x, both.value_y, rtol=1e-6)
