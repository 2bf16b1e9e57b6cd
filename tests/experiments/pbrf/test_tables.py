"""pbrf-tab4 to tab8 and pbrf-appg end to end at smoke scale, solvers and formulas; claims are in test_judges."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.influence.retraining import GAPS
from curvlab.lab import Computed, Run, all_targets, load_config, start, tables, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.linalg import DenseOperator
from experiments.pbrf.appg.claims import guaranteed_steps
from experiments.pbrf.appg.formulas import mean_of_inverses, mean_of_products, neumann_sum
from experiments.pbrf.appg.seconds import s_test_rows
from experiments.pbrf.appg.summary import at_cost, cost_to, geometric
from experiments.pbrf.appg.systems import NetworkSystems
from experiments.pbrf.appg.trajectories import recorded_steps
from experiments.pbrf.gaps import MOVES
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import Decomposition
from experiments.pbrf.solvers import SCALES
from experiments.shared.trajectory import CountedOperator, Counter

from .dense_mlp import dense_gauss_newton, dense_hessian


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
    pd.testing.assert_frame_equal(points[same], other[same], rtol=1e-4)  # Table 5's have five digits
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
    np.testing.assert_allclose(
        points[~missing & (points.seed == 0)].per_example, other[same].per_example, rtol=1e-4
    )
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


# ------------------------------------------------------------------------------------------------------- pbrf-appg
DAMPING, SCALE = 0.2, 30.0


# ------------------------------------------------------------------ formulas
def regression() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((12, 4), (4,)))  # type: ignore[return-value]


@pytest.mark.parametrize("start", [0, 1])
def test_neumann_sum_is_the_sum_of_powers(start: int) -> None:
    x, v = regression()
    matrix = (1 - DAMPING / SCALE) * torch.eye(4, dtype=torch.float64) - x.T @ x / len(x) / SCALE
    expected = sum(torch.linalg.matrix_power(matrix, t) @ v for t in range(start, 31)) / SCALE
    found = neumann_sum(x.T @ x / len(x), v, scale=SCALE, damping=DAMPING, num_terms=30, start=start)
    torch.testing.assert_close(found, expected)


def literal_limit(x: torch.Tensor, v: torch.Tensor, batches: list[list[int]]) -> torch.Tensor:
    """Sum powers of each batch's matrix, as Eq. 49 is printed but from t = 0, until they vanish; the mean."""
    chosen = x[torch.tensor(batches)]
    eye = torch.eye(4, dtype=torch.float64)
    matrices = (1 - DAMPING / SCALE) * eye - chosen.transpose(1, 2) @ chosen / chosen.shape[1] / SCALE
    term, total = v.expand(len(batches), -1)[..., None], torch.zeros(len(batches), 4, 1, dtype=torch.float64)
    while float(term.norm()) > 1e-12:
        total, term = total + term / SCALE, matrices @ term
    return total[..., 0].mean(0)


def test_powers_of_one_batch_tend_to_the_mean_of_inverses() -> None:
    x, v = regression()
    singles = literal_limit(x, v, [[i] for i in range(12)])
    pairs = literal_limit(x, v, [[i, j] for i in range(12) for j in range(12)])
    torch.testing.assert_close(mean_of_inverses(x, v, damping=DAMPING, batch_size=1), singles, rtol=1e-9, atol=0)
    torch.testing.assert_close(mean_of_inverses(x, v, damping=DAMPING, batch_size=2), pairs, rtol=1e-9, atol=0)
    exact = torch.linalg.solve(x.T @ x / 12 + DAMPING * torch.eye(4, dtype=torch.float64), v)
    assert float((singles - exact).norm()) > float((pairs - exact).norm()) > 0.1 * float(exact.norm())
    torch.testing.assert_close(mean_of_products(x, v, scale=SCALE, damping=DAMPING), exact)


# ------------------------------------------------------------------ costs
def test_products_are_counted_for_each_vector() -> None:
    counter = Counter()
    counted = CountedOperator(DenseOperator(torch.eye(3)), counter)
    counted @ torch.ones(3)
    counted @ torch.ones(3, 5)
    assert counter.work == 6
    steps = recorded_steps(100)
    assert steps[:4] == [1, 2, 3, 4]
    assert steps[-1] == 100


def test_costs_are_read_from_a_curve() -> None:
    curve = pd.DataFrame({"work": [1.0, 2.0, 4.0], "error": [0.5, 0.1, 0.2], "correlation": [0.1, 0.5, 0.8]})
    assert np.isnan(cost_to(curve, "error"))  # it falls back
    assert np.isnan(cost_to(curve, "correlation"))
    assert cost_to(curve.head(2), "error") == 2.0
    rising = curve.assign(correlation=[0.95, 0.8, 0.9])
    assert cost_to(rising, "correlation") == 4.0
    assert at_cost(curve, 3.0, "error") == 0.1
    assert np.isnan(at_cost(curve, 0.5, "error"))
    mean, interval = geometric(np.array([1.0, 10.0, 100.0]))
    assert mean == pytest.approx(10.0)
    assert interval.low * interval.high == pytest.approx(100.0)


# ------------------------------------------------------------------ end to end
@pytest.fixture(scope="module")
def appg(run_smoke) -> Path:
    return run_smoke("pbrf/appg")


@pytest.fixture(scope="module")
def systems(appg: Path) -> dict[str, NetworkSystems]:
    """The systems of the smoke run's first seed, with what its store holds."""
    store = appg.parents[3] / "store"
    settings = ["preset=smoke", "tracker=none", "progress=false", f"store.root={store}"]
    cfg = load_config(all_targets()["pbrf/appg"], [*settings, f"results.root={appg.parents[2]}"])
    ((name, own),) = task_settings(cfg).items()
    run = Run(cfg, key="pbrf/appg", title="test")
    network = load_network(run, name, own, 0)
    return {curvature: NetworkSystems.of(network, curvature) for curvature in own.curvatures}


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_reference_solves_the_dense_system(systems: dict[str, NetworkSystems], curvature: str) -> None:
    own = systems[curvature]
    of_network = own.task.model, own.task.train
    matrix = dense_hessian(*of_network)[0] if curvature == "hessian" else dense_gauss_newton(*of_network)
    values = torch.linalg.eigvalsh(matrix)
    assert own.spectrum["largest"] == pytest.approx(float(values[-1]), rel=0.02)
    if curvature == "hessian":
        assert own.spectrum["smallest"] == pytest.approx(float(values[0]), rel=0.02)
        assert float(values[0]) + own.damping > 0
    matrix = matrix + own.damping * torch.eye(len(matrix), dtype=torch.float64)
    torch.testing.assert_close(
        own.reference["solutions"], torch.linalg.solve(matrix, own.right_hand_sides), rtol=1e-6, atol=1e-8
    )


def test_scores_by_s_test_are_those_of_the_dense_inverse(systems: dict[str, NetworkSystems]) -> None:
    own = systems["gauss_newton"]
    rows = s_test_rows(own)
    assert [row["N_test"] for row in rows] == [2, 4]
    assert all(0 < row["largest relative difference"] < 1e-5 for row in rows)
    assert rows[0]["products by s_test"] < rows[1]["products by s_test"] < rows[0]["products by training points"]


def test_curves_start_from_little_and_count_batches_by_their_share(appg: Path) -> None:
    curves = read_table(appg, "curves")
    for _, own in curves.groupby(["curvature", "seed", "method"]):
        assert own.work.is_monotonic_increasing
    cg = curves[curves.method == "CG"].groupby(["curvature", "seed"])
    assert (cg.error.last() < 1e-3).all()
    assert (cg.work.first() == 1).all()
    one, two = (curves[curves.method == f"LiSSA, {runs}"] for runs in ("1 run", "2 runs"))
    np.testing.assert_allclose(one.groupby(["curvature", "seed"]).work.max(), 40 * 8 / 60, rtol=1e-5)
    np.testing.assert_allclose(two.work.to_numpy(), 2 * one.work.to_numpy(), rtol=1e-5)
    # Flat directions lack (1 - λ/σ)^T of their answer, σ = 10, in every repeat.
    left = (1 - 0.1 / 10) ** 40
    final = two[two.curvature == "gauss_newton"].groupby("seed").error.last()
    assert ((final > 0.5 * left) & (final < 1)).all()


def test_results_are_complete_and_printed_formulas_are_refuted(appg: Path) -> None:
    assert set(tables.names(appg)) == {
        "table", "curves", "equal_cost", "states", "formulas", "step_time", "s_test"
    }  # fmt: skip
    verdicts = {result.claim.id: result for result in load_claims(appg)}
    for name in ("printed-start", "printed-powers"):
        assert verdicts[name].verdict == "refuted"
    assert verdicts["depth-suffices"].verdict == "not reproduced"
    for name in ("series-becomes-exact", "products-of-batches", "s-test-equal-mlp-4-diabetes-60"):
        assert verdicts[name].verdict == "reproduced"
    assert verdicts["printed-start"].value == pytest.approx(1.0)
    assert verdicts["hessian-positive-definite-mlp-4-diabetes-60"].verdict == "not reproduced"
    slopes = {"step-independent-of-n": 0.0, "product-linear-in-n": 1.0}  # operations are counted, not timed
    for name, slope in slopes.items():
        assert verdicts[f"{name}-mlp-4-diabetes-60"].value == pytest.approx(slope, abs=1e-3)
    record = json.loads((appg / "run.json").read_text())
    assert {"name": "lissa.num_repeats", "ours": 2, "paper": 5} in record["settings"]


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("condition", [3.0, 400.0, 2000.0])
def test_cg_keeps_what_its_condition_number_guarantees(condition: float) -> None:
    # Chebyshev's points with a start that weighs them alike are hard for CG.
    nodes = np.cos((np.arange(600) + 0.5) * np.pi / 600)
    values = 0.5 * (condition + 1) + 0.5 * (condition - 1) * nodes
    solution = np.ones(600)
    x, residual = np.zeros(600), values * solution
    direction, num_steps = residual.copy(), 0
    while np.linalg.norm(x - solution) > 0.1 * np.linalg.norm(solution):
        size = residual @ residual
        step = size / (direction @ (values * direction))
        x = x + step * direction
        residual = residual - step * values * direction
        direction = residual + (residual @ residual) / size * direction
        num_steps += 1
    bound = float(guaranteed_steps(np.array([condition]), 0.1)[0])
    assert num_steps <= bound
    assert bound < 12 * num_steps
