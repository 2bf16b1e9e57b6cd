"""lissa-fig1: LiSSA and SGD on the same batches against the recursion typed out, and panels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import ProximalBregmanObjective
from curvlab.lab import Computed
from curvlab.lab.claims import load_claims
from curvlab.lab.runs.record import read_record
from curvlab.lab.tables import read_table
from curvlab.linalg import identity
from curvlab.solvers import LissaHyperparameters
from experiments.lissa.fig1 import LARGER, TARGET
from experiments.lissa.fig1.agreement_panels import over_runs, panel_rows
from experiments.lissa.fig1.lissa_and_pbrf import Paired, Pairs, parting_steps, run_paired
from tests.refusals import refuses

DAMPING, STEP_SIZE, NUM_STEPS = 0.3, 0.2, 25


def linear_problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A linear model with a square loss: the Bregman divergence is the quadratic itself."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 3, generator=generator))
    inputs, targets = (torch.randn(12, size, generator=generator).double() for size in (3, 1))
    return model, inputs, targets


def paired(batch_size: int) -> Paired:
    model, inputs, targets = linear_problem()
    loss, data, points = nn.MSELoss(), (inputs, targets), (inputs[:2], targets[:2])
    objective = ProximalBregmanObjective(model, loss, data, candidates=points, damping=DAMPING, epsilon=1e-8)
    gradients = (2 * (model(inputs[:2]) - targets[:2]).detach() * inputs[:2]).T
    damped = GaussNewtonOperator(model, loss, data) + DAMPING * identity
    generators = (torch.Generator().manual_seed(5), torch.Generator().manual_seed(5))
    settings = LissaHyperparameters(STEP_SIZE, batch_size, NUM_STEPS)
    return run_paired(objective, damped, gradients, settings, generators)


def recursion(batch_size: int | None) -> torch.Tensor:
    """x <- x - η ((2/|B| sum xxᵀ + λ) x - g), typed out, with the batches that the generator gives."""
    model, inputs, targets = linear_problem()
    gradients = (2 * (inputs[:2] @ model.weight.T.detach() - targets[:2]) * inputs[:2]).T
    generator, x = torch.Generator().manual_seed(5), torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(NUM_STEPS):
        chosen = inputs
        if batch_size is not None:
            chosen = inputs[torch.randint(len(inputs), (batch_size,), generator=generator)]
        matrix = 2 * chosen.T @ chosen / len(chosen) + DAMPING * torch.eye(3, dtype=torch.float64)
        x = x - STEP_SIZE * (matrix @ x - gradients)
    return x


@pytest.mark.parametrize("batch_size", [4, 11])
def test_both_are_one_recursion_on_the_same_batches(batch_size: int) -> None:
    found, expected = paired(batch_size), recursion(batch_size)
    torch.testing.assert_close(found.solutions, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.displacement, -expected, rtol=1e-6, atol=1e-8)
    assert found.distances.shape == (NUM_STEPS, 2)
    assert (found.distances < 1e-6 * found.lissa_norms).all()
    torch.testing.assert_close(found.lissa_norms[-1], torch.linalg.vector_norm(expected, dim=0))


@pytest.mark.parametrize("batch_size", [12, 500])
def test_batches_of_n_and_more_are_all_the_data(batch_size: int) -> None:
    found, expected = paired(batch_size), recursion(None)
    torch.testing.assert_close(found.solutions, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.displacement, -expected, rtol=1e-6, atol=1e-8)


def test_parting_is_the_first_step_at_which_the_distance_exceeds_half_the_length() -> None:
    lissa = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, math.inf, 4.0]])
    distances = torch.tensor([[0.1, 0.1, 0.1], [1.1, 0.9, 0.9], [0.0, math.inf, 2.0]])
    assert parting_steps(lissa, distances).tolist() == [2, 3, 0]


# ------------------------------------------------------------------------------------ at smoke scale
def test_results_are_consistent_and_scores_those_of_the_settings(smoke_result) -> None:
    smoke: Path = smoke_result("lissa/fig1")
    scores = pd.read_csv(smoke / "scores_mlp-8-digits-200.csv")
    assert len(scores) == 3 * 20  # points x test points
    table = read_table(smoke, "table")
    assert table.constant.value_counts().to_dict() == {
        "C = 2": 3 * 2,  # points x seeds
        "C measured": 2 * 2,
        "C = 2, by importance": 2 * 2,
    }
    assert len(found := table.cg_exact_pearson.dropna()) == 2  # exact_points
    assert (found > 0.99).all()
    # One iteration to first order: LiSSA in single and SGD in double precision, on the same batches.
    assert (table.same_batches_error < 1e-4).all()
    assert (table.parted_step == 0).all()
    assert (table.lissa_pbrf_error > 0.01).all()  # on others
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["self-check"].value == pytest.approx(1, abs=1e-4)
    assert claims["agreement-mlp-8-digits-200"].verdict == "not asked here"  # two seeds
    assert claims["pbrf-overflow"].verdict == claims["cause-mlp-8-digits-200"].verdict == "out of reach"
    cells = read_table(smoke, "cells")
    assert cells.constant.tolist() == ["C = 2", "C measured", "C = 2, by importance"]
    assert claims["cell-unsaturated-assumed"].value == pytest.approx(cells["pearson, other batches"][0])
    assert {"name": "num_points", "ours": 3, "paper": 25} in read_record(smoke)["settings"]
    summary = read_table(smoke, "summary").iloc[0]
    assert summary["damping"] == pytest.approx(0.1 * summary["lambda_max"], rel=1e-4)
    assert summary["step size"] == pytest.approx(1 / (summary["lambda_max"] + summary["damping"]), rel=1e-4)
    assert summary["batch size"] == np.ceil(2 * summary["tr(G)"] / summary["lambda_max"])
    assert summary["steps"] == pytest.approx(2 / (summary["step size"] * summary["damping"]), abs=1)
    assert max(summary["CG residual"], summary["PBRF gradient norm"]) <= 1e-6


@pytest.mark.parametrize(
    ("x", "y", "name"), [("lissa_0", "pbrf_1", "figure.png"), ("cg", "exact", "figure_more.png")]
)
def test_scatter_has_the_linear_answer_on_x_and_the_pbrf_on_y(smoke_result, x: str, y: str, name: str) -> None:
    computed = Computed.of(smoke_result("lissa/fig1"))
    scores = computed["scores_mlp-8-digits-200"]
    expected = scores.loc[scores.point == scores.point.iloc[0], [x, y]].to_numpy()
    first_of_row = TARGET.load("draw")(computed)[name].axes[::4][-1]  # fitted; solved exactly
    np.testing.assert_allclose(first_of_row.collections[0].get_offsets(), expected)


def test_one_seed_is_refused(run_smoke) -> None:
    refuses("SGD on its own batches, and with SGD on the next seed's", run_smoke, "lissa/fig1", "num_seeds=1")


GIVEN = ["damping=0.2", "lissa.step_size=0.05", "lissa.batch_size=30", "lissa.num_steps=12", "exact_points=0"]
GIVEN += ["measured.safety=3"]


def test_lambda_max_is_not_measured_where_all_settings_are_given(run_smoke) -> None:
    folder: Path = run_smoke("lissa/fig1", *GIVEN, drawn=False)
    row = read_table(folder, "summary").iloc[0]
    assert math.isnan(row["lambda_max"])
    assert (row["damping"], row["step size"], row["batch size"], row["steps"]) == (0.2, 0.05, 30, 12)
    # App. B.2: C tr / (1/η - λ), which for Corollary 1's step size is C tr / lambda_max.
    needed = row["C measured, twice"] * row["tr(G)"] / (1 / 0.05 - 0.2)
    assert row["batch size with it"] == math.ceil(needed)
    units = [unit["name"] for unit in read_record(folder)["units"]]
    assert "spectrum/trace" in units
    assert "spectrum/largest" not in units
    measured = read_table(run_smoke("lissa/fig1"), "summary").iloc[0]
    assert row["tr(G)"] == measured["tr(G)"]  # of the same probes


def test_with_one_epsilon_the_larger_is_the_other(run_smoke) -> None:
    """Its rows are those of C = 2, but for rounding: the columns of a product are computed together."""
    folder: Path = run_smoke("lissa/fig1", "larger.epsilon=1e-8", drawn=False)
    own = read_table(folder, "larger_epsilon")
    assert own.columns.tolist() == LARGER
    table = read_table(folder, "table")
    expected = table[(table.constant == "C = 2") & (table.position < 2)].reset_index(drop=True)
    assert len(own) == 2 * 2  # points x seeds
    same = ["task", "position", "seed", "lissa_pbrf_case", "lissa_overflow", "pbrf_overflow", "parted_step"]
    pd.testing.assert_frame_equal(own[same], expected[same])
    for name in ("lissa_pbrf_pearson", "lissa_length"):
        np.testing.assert_allclose(own[name], expected[name], rtol=1e-3)


def test_a_large_epsilon_leaves_the_quadratic_range(run_smoke) -> None:
    own = read_table(run_smoke("lissa/fig1", "larger.epsilon=30", drawn=False), "larger_epsilon")
    assert (own.parted_step > 0).any()
    assert (own.lissa_length <= 1).all()  # while LiSSA is no longer than a solution


# ------------------------------------------------------------------------------------ cases of a panel


def test_a_run_that_is_nan_everywhere_has_overflowed_and_a_solution_that_is_missing_has_not() -> None:
    generator = torch.Generator().manual_seed(0)
    runs, steps = (torch.randn(2, *shape, generator=generator).double() for shape in ((4, 3), (5, 3)))
    pbrf = runs.clone()
    pbrf[1, :, 0] = math.nan
    pairs = Pairs(LissaHyperparameters(0.1, 2, 5), 2.0, runs, pbrf, steps.abs(), steps.abs(), steps.abs())
    solved = dict.fromkeys(("cg", "exact"), runs[0, :, :2])
    rows = panel_rows("mlp", "C = 2", pairs, torch.arange(3), solved, scale=0.1)
    panels = pd.DataFrame(rows).set_index(["position", "seed"])
    assert panels.lissa_pbrf_case.loc[0, 0] == "overflow"  # SGD of the other seed
    assert panels.same_batches_case.loc[0, 1] == "overflow"
    assert (panels.lissa_pbrf_case.drop((0, 0)) != "overflow").all()
    assert panels.cg_exact_case.loc[0, 0] == "agree"
    assert pd.isna(panels.cg_exact_case.loc[2, 0])


@pytest.mark.parametrize("paired", [True, False])
def test_error_over_runs_is_that_of_simulated_runs(paired: bool) -> None:
    generator = np.random.default_rng(0)
    runs = generator.normal(size=(4000, 5))
    panels = (runs + np.roll(runs, -1, axis=1)) / 2 if paired else runs
    true = panels.mean(1).std()
    found = []
    for row in panels[:300]:
        own = pd.DataFrame({"position": 0, "seed": range(5), "x": row})
        how = {"paired": paired, "generator": generator, "within": (-9, 9)}
        value, interval = over_runs(own, "x", lambda v: float(v.mean()), **how)
        found.append((interval.high - value) / 2.776)  # of t with four degrees of freedom
    root = np.sqrt(np.mean(np.square(found)))
    assert root == pytest.approx(true, rel=0.1) or (paired and root > true)
