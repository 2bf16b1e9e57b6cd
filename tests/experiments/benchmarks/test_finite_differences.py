"""bench-finite-differences end to end at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab.reporting import load_claims


def test_error_against_step_has_its_minimum_between_rounding_and_curvature(
    run_smoke: Callable[..., Path],
) -> None:
    folder = run_smoke("benchmarks/finite_differences")
    for name in ("table.csv", "figure.png", "run.json"):
        assert (folder / name).is_file()
    summary = pd.read_csv(folder / "summary.csv")
    for precision, smallest, largest in (("fp32", 1e-5, 1e-1), ("fp64", 1e-7, 1e-2)):
        curve = summary[(summary.precision == precision) & (summary.step > 0)]
        best = curve.loc[curve.relative_error.idxmin()]
        assert smallest < best.step < largest
        assert curve.relative_error.iloc[0] > 100 * best.relative_error
        assert curve.relative_error.iloc[-1] > 100 * best.relative_error
    results = {result.claim.id: result for result in load_claims(folder)}
    table = pd.read_csv(folder / "table.csv")
    for precision, step in (("fp32", 1e-3), ("fp64", 1e-6)):
        own = table[(table.precision == precision) & (table.step == step)].relative_error
        result = results[f"default-step-{precision}-mlp-3-tanh-digits-200"]
        assert result.value == pytest.approx(np.exp(np.log(own).mean()), rel=1e-6)
