"""bench-scale end to end at smoke scale: what is measured, what is forecast, and what is not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab import Computed
from experiments.benchmarks.scale import CG, DEFAULT, DOT, EKFAC, METHODS, PRECONDITIONED, ROWS, summary


def test_every_method_has_a_row_and_says_what_stopped_it(run_smoke: Callable[..., Path]) -> None:
    table = Computed.of(run_smoke("benchmarks/scale"))["scale"]
    assert table.groupby("task").method.apply(tuple).tolist() == [METHODS] * 2
    mlp, opt = (own.set_index("method") for _, own in table.groupby("task", sort=False))
    # All rows of the MLP are G itself: one step, and the scores that the others are compared with.
    assert mlp.residual[ROWS] < 1e-4
    assert mlp.agreement[ROWS] == pytest.approx(1)
    assert mlp.status[CG] == "stopped after 4 steps"
    assert opt.status[ROWS].startswith("not run: outputs of shape")
    # Four steps with two queries, and their residuals.
    assert mlp.products[CG] == 10
    own = mlp.loc[CG]
    hours = (own.products * own.product_seconds * 50 + mlp.seconds[DOT] * 50) * 50_000 / 16 / 3600
    assert own.hours == pytest.approx(hours, rel=1e-4)  # of six digits in the table
    assert mlp.products[EKFAC] == 3


def test_vectors_that_do_not_fit_are_not_tried(run_smoke: Callable[..., Path]) -> None:
    table = Computed.of(run_smoke("benchmarks/scale", "memory_limit=1e-6"))["scale"]
    assert table[table.method == CG].status.str.startswith("not run: vectors of").all()


def test_a_solve_that_did_not_end_is_in_no_ratio() -> None:
    common = {"task": "net", "parameters": 3, "agreement": 0.5}
    rows = [
        common | {"method": CG, "status": "done", "seconds": 8.0, "forecast_seconds": 2.0},
        common | {"method": DEFAULT, "status": "done", "seconds": 6.0},
        common | {"method": PRECONDITIONED, "status": "stopped after 4 steps", "seconds": 1.0},
    ]
    (found,) = summary(pd.DataFrame(rows)).itertuples()
    assert (found.forecast_off, found.default_to_best) == (4, 1)
    assert pd.isna(found.ekfac_to_cg)
