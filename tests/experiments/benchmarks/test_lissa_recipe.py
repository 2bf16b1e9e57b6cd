"""bench-lissa-recipe end to end at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed
from curvlab.lab.reporting import load_claims


def test_both_recipes_on_every_case(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/lissa_recipe")
    assert (folder / "figure.png").is_file()
    table = pd.read_csv(folder / "table.csv")
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
    result, by_importance = load_claims(folder)
    assert by_importance.value == pytest.approx((importance.error_worst <= 0.2).mean())
    assert result.value == pytest.approx((paper.error_worst < 1).mean())


def test_claim_counts_cases_that_diverge(
    computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]
) -> None:
    errors = {"C = 2": [0.1, 5.0, 0.9, 0.3], "C measured": [0.1, 0.1, 0.25, 0.1]}
    errors["C = 2, by importance"] = [0.1, 0.2, 0.25, 0.1]
    outcome = ("answers", "diverges at step 9")  # stopped before its error is large
    rows = [
        {
            "case": str(case),
            "recipe": recipe,
            "error_worst": error,
            "constant": 7.0,
            "batch_size": 9,
            "outcome": outcome[error == 0.9],
        }
        for recipe, values in errors.items()
        for case, error in enumerate(values)
    ]
    result, by_importance = judged(
        "benchmarks/lissa_recipe", computed_of({"table": pd.DataFrame(rows)}, {"seed": 0})
    )
    assert result.value == 0.5
    assert result.verdict == "undecided"
    assert by_importance.value == 0.75
    assert "Errors above 0.2: 2 0.25" in by_importance.explanation
    assert "3 of 4 cases have an error of at most 0.2" in result.explanation
