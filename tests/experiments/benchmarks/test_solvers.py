"""bench-solvers, and Chebyshev iteration."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import Computed
from curvlab.lab.claims import load_claims
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import Lissa
from experiments.benchmarks.solvers import chebyshev
from experiments.benchmarks.solvers.chebyshev import Chebyshev, bounds
from experiments.benchmarks.solvers.crossed import answers_of_one_run
from experiments.benchmarks.solvers.importance import (
    BATCH_TRACE,
    WAYS,
    batch_trace_deviation,
    shares,
)
from experiments.benchmarks.solvers.operations import MORE, Operations
from experiments.benchmarks.solvers.trajectories import LABELS, CountedMatrix, Recorder
from experiments.shared.trajectory import Counter, Trajectory
from tests.matrices import CountingOperator
from tests.refusals import refuses


@pytest.fixture(scope="module")
def result(run_smoke) -> Computed:
    return Computed.of(run_smoke("benchmarks/solvers"))


def test_trajectories_end_at_the_tolerance(result: Computed) -> None:
    table, timing, summary = (result[name] for name in ("table", "timing", "summary"))
    assert "seconds" not in table
    assert set(table.method) == set(LABELS.values())
    assert len(summary) == len(LABELS) * 2  # one or five right-hand sides
    krylov = summary[summary.outcome == "converged"]
    assert len(krylov) == 2 * 7
    assert (krylov.residual <= 0.01).all()
    assert (krylov.error_worst < 0.05).all()
    assert (krylov.correlation > 0.99).all()
    five = summary[summary.num_rhs == 5].set_index("method")
    assert five.work["block CG"] < five.work["CG"]
    assert five.work_over_cg["CG"] == 1
    np.testing.assert_array_equal(table.work, timing.work)
    for column in ("work", "seconds"):
        for _, curve in timing.groupby(["num_rhs", "method"]):
            assert (np.diff(curve[column]) >= 0).all()


def test_preconditioners_save_products(result: Computed) -> None:
    table = result["preconditioners"]
    assert "seconds" not in table
    assert (result["preconditioner_timing"].seconds > 0).all()
    assert (table.residual <= 1e-3).all()
    for _, curve in table.groupby("preconditioner"):
        assert (np.diff(curve.products) > 0).all()  # residuals of 0.1, 0.01, 0.001
    last = table[table.target == 1e-3].set_index("preconditioner").products
    assert last["400 rows, by traces"] < last["none"] < last["CG"]
    counted = result["operations"].set_index("preconditioner")
    assert set(counted.index) == set(table.preconditioner)
    assert (counted.residual <= 0.01).all()
    # A product of an example with one vector: 2 operations for a weight, some four times.
    products = table[table.target == 1e-2].set_index("preconditioner").products
    weights, examples = 64 * 8 + 8 * 10, 200
    quotients = (counted.operations / products)[["none", "CG"]] / (2 * weights * examples)
    assert ((quotients > 2) & (quotients < 8)).all()


def test_importance_keeps_to_its_certificate(result: Computed) -> None:
    lissa, estimates = result["lissa"].set_index("sampling"), result["estimates"]
    assert lissa.index.tolist() == list(WAYS.values())
    by_traces = lissa.loc[WAYS["traces"]]
    assert by_traces.constant <= by_traces.certified <= 1.01
    assert by_traces.error < 1.5 * by_traces.exact_rate
    assert set(result["lissa_steps"].sampling) == set(WAYS.values())
    batches = estimates[estimates.quantity == BATCH_TRACE].groupby("sampling")
    measured, expected = batches.value.std(), batches.exact_sd.first()
    assert expected[WAYS["traces"]] < 0.02 * expected[WAYS["uniform"]]  # only its floor keeps it from 0
    assert 0.5 < measured[WAYS["uniform"]] / expected[WAYS["uniform"]] < 2


def test_all_recipes_on_every_case(result: Computed) -> None:
    table = result["recipes"]
    assert len(table) == 3 * 3  # cases, recipes
    assert table[table.case.str.startswith("mlp-4-diabetes")].damping.nunique() == 2
    paper, auto = (table[table.recipe == recipe].set_index("case") for recipe in ("C = 2", "C measured"))
    np.testing.assert_array_equal(paper.batch_size, np.ceil(2 * paper.trace / paper.lambda_max))
    np.testing.assert_allclose(auto.batch_size, 2 * auto.constant * auto.trace / auto.lambda_max, atol=1)
    assert (auto.error_worst < 0.3).all()
    assert auto.converged.equals(auto.estimated <= 0.2)
    assert not table[["error_worst", "correlation_median"]].isna().any(axis=None)
    importance = table[table.recipe == "C = 2, by importance"].set_index("case")
    assert (importance.constant <= 1.01 + 1e-9).all()
    assert (importance.batch_size <= 1.1 * paper.batch_size + 1).all()
    assert (importance.error_worst < 0.5).all()  # of few steps: noise is left, but it is bounded
    values = {claim.claim.id: claim.value for claim in load_claims(result.folder)}
    assert values["importance-sampling"] == pytest.approx((importance.error_worst <= 0.2).mean())
    assert values["recommended-hyperparameters"] == pytest.approx((paper.error_worst < 1).mean())


def test_the_eight_choices_are_answers_of_the_same_sequences(result: Computed) -> None:
    table = result["crossed"]
    assert (table.groupby(["sampling", "time_constants", "answer"]).repetition.nunique() == 3).all()
    assert table.groupby("sampling").error_worst.nunique().tolist() == [12, 12]
    found = [claim for claim in load_claims(result.folder) if claim.claim.id.startswith("answers-")]
    own = table.query("sampling == 'uniform' and time_constants == 4 and answer == 'average'")
    assert len(found) == 8
    assert found[3].value == pytest.approx(own.error_worst.median())
    assert len({claim.claim.statement for claim in found}) == 8
    assert found[3].claim.statement.endswith("; uniform batches, 4 time constants, average of the last third).")


@pytest.fixture
def of_eight() -> GaussNewtonOperator:
    torch.manual_seed(0)
    data = torch.randn(8, 3), torch.zeros(8).long()
    return GaussNewtonOperator(nn.Linear(3, 2), nn.CrossEntropyLoss(), data)


def test_one_run_gives_what_runs_of_each_length_give(of_eight: GaussNewtonOperator) -> None:
    b, damped, seed, ends = (
        torch.randn(8, 2),
        of_eight + 0.1 * identity,
        torch.Generator().manual_seed,
        {2: 7, 4: 12},
    )
    made = answers_of_one_run(Lissa(0.5, 2, 12), damped, b, ends, seed(1))
    for time, end in ends.items():
        for answer, average in (("last", 0), ("average", end // 3)):
            alone = Lissa(0.5, 2, end, average_last=average).solve(damped, b, generator=seed(1))
            torch.testing.assert_close(made[time, answer], alone.x)


# ------------------------------------------------------------------------------------ counting
def test_work_is_counted_in_shares_of_the_data(of_eight: GaussNewtonOperator) -> None:
    op, counter = of_eight, Counter()
    counted = CountedMatrix(op, counter)
    vectors = torch.randn(8, 5)
    torch.testing.assert_close(counted @ vectors, op @ vectors)
    assert counter.work == 5
    batch = counted.sample(2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch @ vectors, op.sample(2, torch.Generator().manual_seed(0)) @ vectors)
    assert counter.work == 5 + 5 * 2 / 8
    batch.sample(4) @ vectors
    assert counter.work == pytest.approx(5 + 5 * 2 / 8 + 5 * 4 / 8)


def test_recorder_leaves_out_its_own_time() -> None:
    ticks = iter([0.0, 3.0, 10.0, 12.0, 20.0])
    recorder = Recorder(Counter(), Trajectory(torch.ones(4, 2), torch.eye(4)), lambda: next(ticks))
    recorder.start()
    recorder(SimpleNamespace(num_steps=1, x=torch.ones(4, 2) * 1.5))  # at 3, busy until 10
    recorder.record(torch.ones(4, 2))  # at 12
    assert recorder.seconds == [3.0, 5.0]
    torch.testing.assert_close(recorder.trajectory.as_tensors()["errors"][0], torch.full((2,), 0.5))


def test_deviation_of_a_batchs_trace_by_formula_and_by_enumeration() -> None:
    traces = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    # tr(G_i) / (4 q_i) = 2.5, 2.5, 2.5, 6.25 with a mean of 4: 0.6 x 1.5² + 0.4 x 2.25² = 3.375
    assert batch_trace_deviation(traces, q) == pytest.approx(math.sqrt(3.375), rel=1e-12)
    assert batch_trace_deviation(traces, traces / traces.sum()) == pytest.approx(0.0, abs=1e-12)


def test_shares_of_the_trace() -> None:
    traces = torch.tensor([1.0] * 38 + [31.0, 31.0])
    assert shares(traces) == {"top_1_20": 0.62, "top_1_6": pytest.approx(0.66)}


def test_factors_and_products_with_vectors_are_counted() -> None:
    square, b = torch.eye(12, dtype=torch.float64), torch.ones(12, 5, dtype=torch.float64)
    expected = {
        lambda: square @ b: 2 * 12 * 12 * 5,
        lambda: square @ b[:, 0]: 2 * 12 * 12,
        lambda: torch.linalg.cholesky(square): 12**3 // 3,
        lambda: torch.cholesky_solve(b, square): 2 * 12 * 12 * 5,
        lambda: torch.linalg.solve_triangular(square, b, upper=True): 12 * 12 * 5,
        lambda: torch.linalg.solve_triangular(square, b.T, upper=True, left=False): 12 * 12 * 5,
        lambda: torch.linalg.eigh(square): 9 * 12**3,
        lambda: torch.linalg.svd(b, full_matrices=False): 6 * 12 * 5**2 + 20 * 5**3,
    }
    for work, operations in expected.items():
        with Operations() as counted:
            work()
        assert counted.total == operations


@pytest.mark.parametrize("inference", [False, True])
def test_operations_of_a_product_are_those_that_pytorch_counts(
    of_eight: GaussNewtonOperator, inference: bool
) -> None:
    op, vectors = of_eight, torch.randn(8, 5)
    op @ vectors  # the first looks at an example, too
    with torch.inference_mode(inference), Operations() as counted:
        op @ vectors
    with FlopCounterMode(display=False, custom_mapping=MORE) as theirs:
        op @ vectors
    assert counted.total == theirs.get_total_flops() > 0


# ------------------------------------------------------------------------------------ Chebyshev iteration
def spread(size: int = 60) -> torch.Tensor:
    return torch.diag(torch.linspace(0, 1, size, dtype=torch.float64))


def test_residuals_are_chebyshev_polynomials() -> None:
    """On a diagonal matrix the residual's entries are T_t(z) / T_t(z_0), evaluated here by cosines."""
    b = torch.ones(60, 1, dtype=torch.float64)
    op = DenseOperator(spread()) + 0.01 * identity
    seen: dict[int, torch.Tensor] = {}
    Chebyshev(1e-2, lambda state: seen.update({state.num_steps: state.x.clone()})).solve(op, b, generator=0)
    smallest, largest, _ = bounds(op, 0)
    assert 1.01 < largest < 1.04
    center, radius = (largest + smallest) / 2, (largest - smallest) / 2
    eigenvalues = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None] + 0.01
    inside = torch.cos(9 * torch.acos((center - eigenvalues) / radius))
    outside = torch.cosh(9 * torch.acosh(torch.tensor(center / radius, dtype=torch.float64)))
    torch.testing.assert_close(b - op @ seen[9], inside / outside, rtol=1e-8, atol=1e-10)


def test_columns_stop_where_they_are_solved_and_all_products_are_counted(generator) -> None:
    op = CountingOperator(spread())
    b = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    b[:, 1:] *= torch.tensor([0, 1e3])
    solution = Chebyshev(rtol=1e-3).solve(op + 0.01 * identity, b, generator=generator)
    assert solution.converged
    assert solution.num_matvecs == op.columns
    # 2 q^t with q = (sqrt(kappa) - 1) / (sqrt(kappa) + 1), kappa about 101: 40 steps a column that is not zero.
    assert op.columns <= 60 + 2 * 42
    damped = spread() + 0.01 * torch.eye(60, dtype=torch.float64)
    residuals = (b - damped @ solution.x).norm(dim=0)
    torch.testing.assert_close(residuals, solution.residual * b.norm(dim=0), rtol=1e-6, atol=1e-12)
    assert (solution.residual <= 1e-3).all()


def test_too_small_a_bound_is_noticed(monkeypatch) -> None:
    op = DenseOperator(spread()) + 0.01 * identity
    monkeypatch.setattr(chebyshev, "bounds", lambda *_: (0.01, 0.5, 0))
    refuses(r"an eigenvalue lies above 0\.5", Chebyshev(1e-2).solve, op, torch.ones(60, 1, dtype=torch.float64))


@pytest.mark.parametrize("key", [f"benchmarks/{name}" for name in ("attribution", "solvers", "speed", "llc")])
def test_claims_of_parts_that_are_not_run_say_all_of_what(key: str, judged, tmp_path: Path) -> None:
    results = judged(key, Computed(tmp_path, {"parts": [], "seed": 0}))
    assert {result.verdict for result in results} == {"out of reach"}
    assert not [result.claim.id for result in results if "()" in result.claim.statement]
    assert any(result.claim.id.endswith("-all") for result in results)
