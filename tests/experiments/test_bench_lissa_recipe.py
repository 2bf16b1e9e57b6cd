"""bench-lissa-recipe end to end at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import load_claims
from experiments.benchmarks.lissa_recipe import judge_recipe, main
from experiments.benchmarks.lissa_recipe_plot import draw


def test_both_recipes_on_every_case(run_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_target(main, "benchmarks/lissa_recipe") / "benchmarks" / "lissa_recipe" / "smoke"
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 2 * 2
    paper, auto = (table[table.recipe == recipe].set_index("case") for recipe in ("C = 2", "C measured"))
    np.testing.assert_array_equal(paper.batch_size, np.ceil(2 * paper.trace / paper.lambda_max))
    np.testing.assert_allclose(auto.batch_size, 2 * auto.constant * auto.trace / auto.lambda_max, atol=1)
    assert (auto.error_worst < 0.3).all()
    assert auto.converged.equals(auto.estimated <= 0.2)
    assert not table[["error_worst", "correlation_median"]].isna().any(axis=None)
    (result,) = load_claims(folder)
    assert result.value == pytest.approx((paper.error_worst < 1).mean())
    draw(table).savefig(tmp_path / "figure.png", dpi=110, metadata={"Software": None})
    assert (tmp_path / "figure.png").read_bytes() == (folder / "figure.png").read_bytes()


def test_claim_counts_cases_that_diverge() -> None:
    errors = {"C = 2": [0.1, 5.0, 0.9, 0.3], "C measured": [0.1, 0.1, 0.25, 0.1]}
    outcome = ("answers", "diverges at step 9")  # stopped before its error is large
    rows = [
        {
            "case": str(case),
            "recipe": recipe,
            "error_worst": error,
            "constant": 7.0,
            "outcome": outcome[error == 0.9],
        }
        for recipe, values in errors.items()
        for case, error in enumerate(values)
    ]
    result = judge_recipe(pd.DataFrame(rows), seed=0)
    assert result.value == 0.5
    assert result.verdict == "undecided"
    assert "3 of 4 cases have an error of at most 0.2" in result.explanation
