"""pbrf-appg: solvers, formulas and claims."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.lab import Run, all_targets, load_config, tables, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.linalg import DenseOperator
from experiments.pbrf.appg.cost_claims import guaranteed_steps
from experiments.pbrf.appg.formulas import mean_of_inverses, mean_of_products, neumann_sum
from experiments.pbrf.appg.seconds import s_test_rows
from experiments.pbrf.appg.summary import at_cost, cost_to, geometric
from experiments.pbrf.appg.systems import NetworkSystems
from experiments.pbrf.appg.trajectories import CountedOperator, recorded_steps
from experiments.pbrf.networks import load_network

from .dense_mlp import dense_gauss_newton, dense_hessian

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
    counted = CountedOperator(DenseOperator(torch.eye(3)))
    counted @ torch.ones(3)
    counted @ torch.ones(3, 5)
    assert counted.num_products == 6
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
def smoke(run_smoke) -> Path:
    return run_smoke("pbrf/appg")


@pytest.fixture(scope="module")
def systems(smoke: Path) -> dict[str, NetworkSystems]:
    """The systems of the smoke run's first seed, with what its store holds."""
    store = smoke.parents[3] / "store"
    settings = ["preset=smoke", "tracker=none", "progress=false", f"store.root={store}"]
    cfg = load_config(all_targets()["pbrf/appg"], [*settings, f"results.root={smoke.parents[2]}"])
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


def test_curves_start_from_little_and_count_batches_by_their_share(smoke: Path) -> None:
    curves = read_table(smoke, "curves")
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


def test_results_are_complete_and_printed_formulas_are_refuted(smoke: Path) -> None:
    assert set(tables.names(smoke)) == {
        "table", "curves", "equal_cost", "states", "formulas", "step_time", "s_test"
    }  # fmt: skip
    verdicts = {result.claim.id: result for result in load_claims(smoke)}
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
    record = json.loads((smoke / "run.json").read_text())
    assert {"name": "lissa.num_repeats", "ours": 2, "paper": 5} in record["settings"]


# ---- pbrf-appg: verdicts on made-up tables, and the bounds and seconds that stand in them
TASK = "made-up"
WORK = [1.0, 2.0, 4.0, 8.0]


def curves_of(
    correlations: dict[str, list[float]], errors: dict[str, list[float]], num_seeds: int = 3
) -> pd.DataFrame:
    """Return curves of CG, and of one run and the mean of five of LiSSA, which costs five times as much."""
    factors = {"CG": 1.0, "LiSSA, 1 run": 0.5, "LiSSA, 5 runs": 2.5}
    frames = []
    for seed, (method, factor) in product(range(num_seeds), factors.items()):
        own = {"task": TASK, "curvature": "gauss_newton", "seed": seed, "method": method}
        own |= {"work": factor * np.array(WORK), "correlation": correlations.get(method, [0.1, 0.5, 0.95, 1.0])}
        own["error"] = own["error_worst"] = errors.get(method, [0.9, 0.5, 0.05, 0.01])
        frames.append(pd.DataFrame(own))
    return pd.concat(frames, ignore_index=True)


def states_of(largest: list[float], damping: float = 0.05) -> pd.DataFrame:
    state = {"task": TASK, "curvature": "gauss_newton", "P": 100, "N": 40, "smallest eigenvalue": 0.0}
    state |= {"damping asked for": damping, "damping": damping, "LiSSA scale": 10.0}
    return pd.DataFrame(state | {"seed": range(len(largest)), "largest eigenvalue": largest})


@pytest.fixture
def verdicts(results_of):
    """Return a function that judges made-up tables, and gives the results by claim."""
    usual = {"states": states_of([5.0, 5.0, 5.0]), "curves": curves_of({}, {}), "table": ENDS}
    return lambda config=None, **tables: results_of("pbrf/appg", usual | tables, config, TASK)


ENDS = pd.DataFrame({"task": [TASK], "method": "LiSSA, 1 run", "num_steps": 5000.0}).assign(
    damping=0.001, error=0.24, correlation=0.97
)


@pytest.mark.parametrize(("steps", "verdict"), [(0, "not reproduced"), (1, "not reproduced"), (3, "undecided")])
def test_lissa_that_never_gets_there_costs_more_than_one_run(verdicts, steps: int, verdict: str) -> None:
    errors = {"LiSSA, 1 run": [0.5] * 4, "LiSSA, 5 runs": [0.5] * 4}
    errors["CG"] = [0.9] * steps + [0.05] * (4 - steps)
    result = verdicts(curves=curves_of({}, errors))["cheaper-solution"]
    bound = 0.5 * WORK[-1] / WORK[steps]  # and not 2.5 times its work, that of five runs
    assert result.verdict == verdict
    assert result.value == pytest.approx(bound)
    assert (result.interval.low, result.interval.high) == (pytest.approx(bound), np.inf)
    assert result.interval.kind == "lower bounds in 3 of 3 seeds, from the least ratio on"
    assert f"at least {bound:.2g}, at least {bound:.2g}, at least {bound:.2g}" in result.explanation


def test_lower_bounds_of_one_seed_decide_nothing(verdicts) -> None:
    errors = {"CG": [0.05] * 4, "LiSSA, 1 run": [0.5] * 4, "LiSSA, 5 runs": [0.5] * 4}
    found = verdicts(curves=curves_of({}, errors, num_seeds=1), states=states_of([5.0]))
    assert found["cheaper-solution"].verdict == "not asked here"
    assert found["cheaper-solution"].value == pytest.approx(4.0)


def test_a_goal_that_is_lost_again_was_not_reached(verdicts) -> None:
    falling_back = {"LiSSA, 1 run": [0.95, 0.95, 0.95, 0.8], "LiSSA, 5 runs": [0.95, 0.5, 0.95, 0.95]}
    result = verdicts(curves=curves_of(falling_back, {}))["cheaper-scores"]
    assert result.value == pytest.approx(2.5 * 4.0 / 4.0)  # the mean of five, from its third iterate on
    assert result.verdict == "not reproduced"


def test_an_unstable_seed_is_named_and_left_out(verdicts) -> None:
    curves = curves_of({}, {"LiSSA, 5 runs": [0.9, 0.5, 0.4, 0.01]})
    dear = (curves.seed == 1) & curves.method.str.startswith("LiSSA")
    curves.loc[dear, ["correlation", "error"]] = [0.1, 0.7]
    found = verdicts(states=states_of([5.0, 19.96, 5.0]), curves=curves)
    for name in ("cheaper-scores", "cheaper-solution", "repeats-help"):
        assert found[name].interval.num_samples == 2
        assert found[name].verdict == "not asked here"
        assert "unstable in seed 1" in found[name].explanation
        assert "2.001" in found[name].explanation
    assert found["cheaper-scores"].value == pytest.approx(0.5)
    assert "Left out, since unstable in seed 1: at least 1;" in found["cheaper-scores"].explanation
    stable = verdicts(states=states_of([5.0, 19.94, 5.0]), curves=curves)["cheaper-scores"]
    assert "unstable" not in stable.explanation
    assert stable.interval.num_samples == 3


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0.5, 0.5, 0.5], "What is left is less noise"),
        ([0.2, 0.2, 0.2], "It is noise that the mean lessens."),
        ([0.5, 0.2, 0.2], "In seed 0 what is left is less noise"),
    ],
)
def test_what_repeats_leave_is_said_as_it_is_found(verdicts, ends: list[float], said: str) -> None:
    curves = curves_of({}, {"LiSSA, 1 run": [0.9, 0.8, 0.7, 0.5]})
    for seed, end in enumerate(ends):
        last = (curves.seed == seed) & (curves.method == "LiSSA, 5 runs") & (curves.work == 2.5 * WORK[-1])
        curves.loc[last, "error"] = end
    assert said in verdicts(curves=curves)["repeats-help"].explanation


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


@pytest.mark.parametrize(("steps", "verdict"), [(1, "reproduced"), (2, "not reproduced")])
def test_truncated_cg_is_judged_by_what_its_condition_number_guarantees(
    verdicts, steps: int, verdict: str
) -> None:
    states = states_of([0.02, 0.02, 0.02], damping=0.002).assign(P=1441)
    curves = curves_of({}, {"CG": [0.9] * steps + [0.05] * (4 - steps)})
    result = verdicts(states=states, curves=curves)["truncated-cg"]
    assert result.verdict == verdict
    assert result.value == pytest.approx(WORK[steps] / guaranteed_steps(np.array([11.0]), 0.1)[0])
    assert "11 at most, guarantees" in result.explanation
    curves.loc[(curves.seed == 0) & (curves.method == "CG"), "error_worst"] = 0.2  # a system that never gets there
    assert verdicts(states=states, curves=curves)["truncated-cg"].verdict == "undecided"
    few = verdicts(states=states.assign(P=4), curves=curves_of({}, {}))["truncated-cg"]
    assert few.value == pytest.approx(WORK[2] / 4)  # after as many steps as unknowns it is exact


def test_s_test_that_saves_half_of_what_it_should_is_seen(verdicts) -> None:
    table = pd.DataFrame(product(range(3), (10, 20)), columns=["seed", "N_test"]).assign(task=TASK, N=80)
    table["seconds by training points"], table["seconds by s_test"] = 7.0, 7.0 * table.N_test / 20
    table["products by training points"] = 800 + 10 * table.seed
    table["products by s_test"] = 2 * (800 + 10 * table.seed) * table.N_test / 80
    table["largest relative difference"] = 1e-7
    result = verdicts(s_test=table)["s-test-saves"]
    assert result.value == pytest.approx(0.5)
    assert result.verdict == "not reproduced"
    table["products by s_test"] /= 2
    result = verdicts(s_test=table)["s-test-saves"]
    assert result.verdict == "reproduced"
    assert result.explanation == "Of seconds the ratio is 0.25 (0.25 to 0.25)."  # shown, and not judged


def test_seconds_stand_beside_the_cost(verdicts) -> None:
    rows = [
        {"task": TASK, "step": step, "N": num, "repeat": r, "operations": 9e6, "milliseconds": milliseconds}
        for num in (4000, 8000)
        for step, milliseconds in (("CG", num / 200), ("LiSSA", num / 5000))
        for r in range(3)
    ]
    config = {"step_time": {"batch_size": 32}, "tasks": {TASK.replace("-", "_"): {}}}
    found = verdicts(config, step_time=pd.DataFrame(rows))
    expected = "a step of 32 examples takes 1.2 ms, where |B| / N of a product counts for 0.16 ms"
    for name in ("cheaper-scores", "cheaper-solution"):
        assert expected in found[name].explanation
        assert "in time LiSSA costs 7.5 times as much there." in found[name].explanation
    # Operations are judged; seconds, which grow here, are shown.
    for name, verdict in (("step-independent-of-n", "reproduced"), ("product-linear-in-n", "not reproduced")):
        assert (found[name].value, found[name].verdict) == (pytest.approx(0.0), verdict)
        assert "The slope of milliseconds is 1 (1 to 1 in 3 repeats)." in found[name].explanation
    assert "cost is no time" not in verdicts()["cheaper-scores"].explanation


def test_depth_stands_beside_what_was_measured_with_it(verdicts) -> None:
    left = [(1 - 0.001 / scale) ** 5000 for scale in (10, 500)]
    depth = pd.DataFrame({"formula": "depth", "case": ["σ = 10", "σ = 500"], "num_terms": 5000.0, "error": left})
    errors = {"from 0": 0.0, "from 1": 1.0, "products": 0.0, "powers of one batch": 1.0}
    others = pd.DataFrame(errors.items(), columns=["formula", "error"]).assign(case="any", num_terms=np.inf)
    result = verdicts(formulas=pd.concat([others, depth], ignore_index=True))["depth-suffices"]
    assert result.verdict == "not reproduced"
    # (1 - (h + λ)/σ)^T = 0.1
    curvature = 10 * (1 - 0.1 ** (1 / 5000)) - 0.001
    assert f"more than a tenth up to h = {curvature:.2g} (σ = 10)" in result.explanation
    assert f"{TASK} 0.24 (0.97)." in result.explanation


def test_tasks_that_measure_nothing_leave_claims_out_of_reach(verdicts) -> None:
    found = verdicts()
    for name in ("s-test-equal-all", "s-test-saves-all", "step-independent-of-n-all", "printed-start"):
        assert found[name].verdict == "out of reach"
    curves = curves_of({}, {})  # methods.gauss_newton=[lissa]
    found = verdicts(curves=curves[curves.method != "CG"])
    assert {found[name].verdict for name in ("truncated-cg-all", "cheaper-scores-all", "repeats-help-all")} == {
        "out of reach"
    }
