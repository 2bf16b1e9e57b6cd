"""pbrf-tab4 to tab8 end to end at smoke scale, and claims of tab6 to tab8 on tables that are made up."""

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


# --- The claims of pbrf-tab6, tab7 and tab8 on tables that are made up
EXPLAINING = {"carried_on": 0.95, "minimum": 0.95, "small_weight": 0.99}
EXPLAINING |= {"linearised": 0.6, "linearised_minimum": 0.9}


def made_up(
    pearson: dict[str, float], curvature: str, *, seeds: int = 3, residual: float = 1e-6, **lissa: float
) -> dict[str, pd.DataFrame]:
    """Some seeds, all alike but for a thousandth; `lissa` changes what LiSSA at one scaling says of a response."""
    estimates = {"exact": pearson, "LiSSA, σ = 10": dict.fromkeys(pearson, float("nan")), "own length": pearson}
    estimates |= {"LiSSA, σ = 25": pearson | lissa, "LiSSA, σ = 50": dict.fromkeys(pearson, 0.0)}
    rows = [
        {"task": "mlp", "seed": seed, "curvature": curvature, "estimate": estimate, "response": response}
        | {"coefficient": coefficient}
        | {"way": way, "value": value + 0.001 * seed, "low": value - 0.1, "high": value + 0.1, "points": 20}
        for seed in range(seeds)
        for estimate, values in estimates.items()
        for response, value in values.items()
        for coefficient in ("pearson", "spearman")
        for way in ("over_test", "over_points", "pooled")
    ]
    table = [{"task": "mlp", "curvature": curvature, "response": response} for response in pearson]
    networks = [
        {"task": "mlp", "seed": seed, "P": 1000, f"{curvature} residual": residual}
        | {"train_loss": 0.1, "constant_loss": 1.0}
        | ({"num_below": 180.0, "nearest": 1e-5} if curvature == "hessian" else {})
        for seed in range(seeds)
    ]
    points = [
        {"task": "mlp", "seed": 0, "point": point, "weight over damping": 2.0, "carried_on gradient norm": 0.05}
        | {"carried_on distance": 0.9, "carried_on fall": 0.9, "small_weight gradient norm": 1e-5}
        for point in range(4)
    ]
    tables = {"table": table, "correlations": rows, "networks": networks, "points": points}
    return {name: pd.DataFrame(entries) for name, entries in tables.items()}


@pytest.fixture
def verdicts(results_of):
    return lambda key, tables: results_of(key, tables, task="mlp")


AS_PRINTED = {"cold": 0.0, "warm": 0.1, "proximal_bregman": 0.95} | EXPLAINING


def words(found, names: set[str]) -> dict[str, str]:
    return {name: result.verdict for name, result in found.items() if name in names}


PAPER = {"pbrf", "pbrf-ranks", "above-cold", "above-warm", "cold", "warm"}
OURS = {"exact", "own-length", "minimum", "small-weight", "smallest-scaling"}


def test_the_central_claim_is_judged_by_its_bounds(verdicts) -> None:
    sixth = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton"))
    assert words(sixth, PAPER | OURS) == dict.fromkeys(PAPER | OURS, "reproduced")
    assert sixth["above-cold"].value == pytest.approx(0.95)
    for name in PAPER:  # of reproduced claims, too; LiSSA that is finite, at its best scaling
        assert sixth[name].explanation.startswith("By LiSSA, σ = 25:")
    seventh = verdicts("pbrf/tab7", made_up(AS_PRINTED | {"cold": -0.01}, "hessian"))
    assert set(seventh) == PAPER | OURS - {"minimum", "small-weight"}
    assert {result.verdict for result in seventh.values()} == {"reproduced"}
    assert "180 to 180 of 1000 eigenvalues" in seventh["pbrf"].explanation


def test_lissa_and_the_exact_solve_are_judged_apart(verdicts) -> None:
    low = AS_PRINTED | {"proximal_bregman": 0.1}
    found = verdicts("pbrf/tab7", made_up(low, "hessian", residual=1e-3, proximal_bregman=0.95))
    assert found["pbrf"].verdict == "reproduced"  # whatever the residual of the exact solve
    assert found["exact"].verdict == "out of reach"
    assert "residual of 0.001" in found["exact"].explanation
    found = verdicts("pbrf/tab7", made_up(low, "hessian", proximal_bregman=0.95))
    assert (found["exact"].verdict, found["own-length"].verdict) == ("not reproduced", "not reproduced")


def test_the_scaling_is_the_best_or_the_smallest_and_over_points_is_not_over_test(verdicts) -> None:
    tables = made_up(AS_PRINTED, "gauss_newton", proximal_bregman=0.6)  # at 25, the smallest that is finite
    rows = tables["correlations"]
    rows.loc[(rows.estimate == "LiSSA, σ = 50") & (rows.response == "proximal_bregman"), "value"] = 0.95
    warm = (rows.response == "warm") & (rows.estimate == "LiSSA, σ = 50")
    rows.loc[warm & (rows.way == "over_points"), "value"] = [0.6, 0.61, 0.62] * 2
    found = verdicts("pbrf/tab6", tables)
    assert (found["pbrf"].verdict, found["smallest-scaling"].verdict) == ("reproduced", "direction only")
    assert (found["warm"].value, found["over-points"].value) == pytest.approx((0.001, 0.61), abs=2e-3)


def test_without_lissa_the_exact_claims_are_kept(verdicts) -> None:
    tables, after = made_up(AS_PRINTED, "gauss_newton"), {"own-length", "smallest-scaling"}
    found = verdicts("pbrf/tab6", tables | {"correlations": tables["correlations"].query("estimate == 'exact'")})
    assert set(words(found, PAPER | after).values()) == {"out of reach"}
    assert set(words(found, OURS - after).values()) == {"reproduced"}


def test_where_influence_predicts_nothing_small_correlations_are_no_finding(verdicts) -> None:
    nothing = AS_PRINTED | {"cold": 0.0, "warm": 0.0, "proximal_bregman": -0.01}
    found = verdicts("pbrf/tab6", made_up(nothing, "gauss_newton", proximal_bregman=0.1))
    assert words(found, {"cold", "warm"}) == dict.fromkeys(("cold", "warm"), "out of reach")
    assert words(found, {"pbrf", "pbrf-ranks"}) == dict.fromkeys(("pbrf", "pbrf-ranks"), "not reproduced")
    found = verdicts("pbrf/tab6", made_up(nothing | {"cold": 0.4}, "gauss_newton", proximal_bregman=0.1))
    assert found["above-cold"].verdict == "not reproduced"


def test_a_large_negative_correlation_is_not_small(verdicts) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED | {"cold": -0.9}, "gauss_newton"))
    assert (found["cold"].verdict, found["above-cold"].verdict) == ("not reproduced", "reproduced")


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(verdicts, seeds: int) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton", seeds=seeds))
    names = {"pbrf", "pbrf-ranks", "above-cold", "small-weight"}
    assert words(found, names) == dict.fromkeys(names, "not asked here")


def test_without_points_at_a_minimum_the_claim_on_it_is_out_of_reach(verdicts) -> None:
    without = {name: value for name, value in AS_PRINTED.items() if name != "minimum"}
    found = verdicts("pbrf/tab6", made_up(without, "gauss_newton"))
    assert found["minimum"].verdict == "out of reach"
    assert "in 0 of 3 seeds" in found["minimum"].explanation


@pytest.mark.parametrize(
    ("two_stage", "warm", "pbrf", "expected"),
    [
        (0.7, 0.2, 0.9, ["reproduced"] * 3),
        (0.9, 0.9, 0.91, ["direction only", "reproduced", "reproduced"]),
        (0.1, 0.1, 0.9, ["direction only"] * 3),  # two stages that fail are no finding
        (0.1, 0.1, 0.2, ["direction only", "out of reach", "direction only"]),
    ],
)
def test_two_stages_are_judged_by_differences(verdicts, two_stage, warm, pbrf, expected) -> None:
    # The two rates are two readings of one table: alike, they are judged alike.
    stages = {"two_stage": two_stage, "slow_two_stage": two_stage}
    tables = made_up(stages | {"warm": warm, "proximal_bregman": pbrf}, "hessian")
    tables.pop("points")  # those of tab7
    found = verdicts("pbrf/tab8", tables)
    for prefix in ("", "slow-"):
        names = (f"{prefix}{name}" for name in ("above-warm-start", "below-pbrf", "two-stages"))
        assert [found[name].verdict for name in names] == expected
    assert found["above-warm-start"].value == pytest.approx(two_stage - warm)


def test_of_points_that_share_a_network_each_seed_counts_once(verdicts) -> None:
    tables = made_up({"two_stage": 0.7, "warm": 0.2, "proximal_bregman": 0.9}, "hessian")
    points = pd.DataFrame(
        {"task": "mlp", "seed": [0] * 8 + [1, 2], "kept": 1.0, "slow_two_stage": [0.9] * 8 + [0.5, 0.7]}
    )
    found = verdicts("pbrf/tab8", tables | {"points": points})["sign-kept"]
    assert found.value == pytest.approx(0.7)
    assert found.interval.num_samples == 3
