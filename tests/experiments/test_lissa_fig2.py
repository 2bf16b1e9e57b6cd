"""lissa-fig2 end to end at smoke scale, and its exact solutions against dense ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.reporting import load_claims
from experiments.lissa.fig2_batch_size import main
from experiments.lissa.fig2_convergence import recorded_steps
from experiments.lissa.fig2_plot import draw
from experiments.lissa.fig2_recipe import correlation


@pytest.fixture
def smoke(run_target: Callable[..., Path]) -> Path:
    return run_target(main, "lissa/fig2_batch_size") / "lissa" / "fig2" / "smoke"


def test_results_are_complete_and_consistent(smoke: Path, tmp_path: Path) -> None:
    table, between, recipes = (
        pd.read_csv(smoke / f"{name}.csv") for name in ("table", "between_steps", "recipes")
    )
    assert len(table) == 3 * 3 * len(recorded_steps(60))  # batch sizes, points
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
    verdicts = {result.claim.id: result.verdict for result in load_claims(smoke)}
    assert set(verdicts) == {
        "converges-mlp-digits",
        "faster-recommended-mlp-digits",
        "faster-double-mlp-digits",
        "recipe-converges-mlp-digits-overfitted",
    }
    record = json.loads((smoke / "run.json").read_text())
    assert record["scale"]["batch sizes"]["ours"] == [f"{large} {recommended} {small}x10", "by recipe"]
    for name, figure in draw(table, between, recipes).items():
        figure.savefig(tmp_path / name, dpi=110, metadata={"Software": None})
        assert (tmp_path / name).read_bytes() == (smoke / name).read_bytes()


def test_recorded_steps_are_first_ones_and_equal_ones() -> None:
    steps = recorded_steps(1000)
    assert steps[:6] == [1, 2, 5, 10, 20, 40]
    assert steps[-1] == 1000
    assert set(np.diff(steps[5:])) == {40}
    assert recorded_steps(10) == list(range(1, 11))


def test_correlation_of_what_overflowed_is_zero() -> None:
    left = torch.tensor([[1.0, float("inf"), 1.0], [2.0, 1.0, 1.0], [4.0, 2.0, 1.0]])
    right = torch.tensor([[2.0, 1.0, 1.0], [4.0, 1.0, 2.0], [8.0, 2.0, 3.0]])
    torch.testing.assert_close(correlation(left, right), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
