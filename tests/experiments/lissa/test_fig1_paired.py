"""lissa-fig1: LiSSA and SGD on the same batches against the recursion typed out, and what is judged of them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import ProximalBregmanObjective
from curvlab.linalg import identity
from curvlab.solvers import LissaHyperparameters
from experiments.lissa.fig1.paired import Paired, parting_steps, run_paired
from experiments.lissa.fig1.tables import cell_table

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
    objective = ProximalBregmanObjective(model, loss, data, points, damping=DAMPING, epsilon=1e-8)
    gradients = torch.stack(
        [2 * (model(x) - y).detach() * x for x, y in zip(inputs[:2], targets[:2], strict=True)]
    ).T
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


def panel_rows(task: str, constant: str, pearson: list[float], **more: object) -> pd.DataFrame:
    """Rows of a task, one for each point, of one seed; a nan is an overflow of SGD."""
    values = np.array(pearson)
    overflow = np.isnan(values)
    rows = {
        "task": task,
        "constant": constant,
        "position": np.arange(len(values)),
        "seed": 0,
        "lissa_length": 0.5,
        "lissa_overflow": False,
        "pbrf_overflow": overflow,
        "parted_step": 0,
        "length_at_parting": math.nan,
        "lissa_pbrf_pearson": values,
        "lissa_pbrf_slope": values,
        "lissa_pbrf_case": np.where(overflow, "overflow", np.where(values >= 0.9, "agree", "apart")),
        "same_batches_pearson": values,
        "same_batches_case": np.where(overflow, "overflow", "agree"),
    }
    return pd.DataFrame(rows | more)


def summary(**losses: float) -> pd.DataFrame:
    regimes = ["early" if loss >= 0.5 else "fitted" for loss in losses.values()]
    return pd.DataFrame({"task": list(losses), "regime": regimes})


def test_a_cell_is_as_good_as_its_worst_network_and_overflow_counts_as_minus_one() -> None:
    table = pd.concat(
        [
            panel_rows("good", "C = 2", [0.99, 0.98, 0.97]),
            panel_rows("bad", "C = 2", [0.99, math.nan, math.nan]),
            panel_rows("fit", "C = 2", [0.2, 0.1, 0.3]),
        ]
    )
    cells = cell_table(table, summary(good=1.0, bad=0.7, fit=0.1))
    assert cells.regime.tolist() == ["early", "fitted"]
    assert cells["pearson, other batches"].tolist() == pytest.approx([-1.0, 0.2])
    assert cells["PBRF overflow"].tolist() == pytest.approx([2 / 6, 0])
    assert cells["LiSSA overflow"].tolist() == [0, 0]


def test_cause_tells_leaving_the_range_from_diverging_before_and_from_other_batches(computed_of, judged) -> None:
    kinds = {
        "left": {"parted_step": 7, "length_at_parting": 0.4},
        "after": {"parted_step": 7, "length_at_parting": 30.0},
        "never": {"parted_step": 0},
    }
    table = pd.concat([panel_rows(name, "C = 2", [0.1, 0.2, 0.3], **more) for name, more in kinds.items()])
    tables = {"table": table, "summary": summary(left=0.1, after=0.1, never=0.1)}
    found = {result.claim.id: result for result in judged("lissa/fig1", computed_of(tables, {"seed": 0}))}
    assert found["cause-left"].verdict == "reproduced"
    assert found["cause-after"].verdict == found["cause-never"].verdict == "not reproduced"
    assert "in 3 of them only when that LiSSA is longer" in found["cause-after"].explanation
    assert "In 3 the two stay together" in found["cause-never"].explanation
    assert found["cell-fitted-assumed"].verdict == "not reproduced"
    assert found["cell-early-assumed"].verdict == "out of reach"


def test_overflows_are_counted_each_for_itself(computed_of, judged) -> None:
    table = panel_rows("mlp", "C = 2", [0.99, 0.98, math.nan])
    tables = {"table": table, "summary": summary(mlp=0.1)}
    found = {result.claim.id: result for result in judged("lissa/fig1", computed_of(tables, {"seed": 0}))}
    assert found["pbrf-overflow"].value == 1
    assert found["pbrf-overflow"].verdict == "not reproduced"
    assert "LiSSA overflows in 0, SGD on the same batches in 1" in found["overflow"].explanation
    table["lissa_overflow"] = table.pbrf_overflow  # both: LiSSA's batches have taken SGD along
    found = {r.claim.id: r for r in judged("lissa/fig1", computed_of(tables | {"table": table}, {"seed": 0}))}
    assert found["pbrf-overflow"].verdict == "reproduced"
