from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from curvlab.reporting import load_claims
from experiments.benchmarks.finite_differences import main


def test_error_against_step_has_its_minimum_between_rounding_and_curvature(
    run_target: Callable[..., Path],
) -> None:
    folder = run_target(main, "benchmarks/finite_differences") / "benchmarks" / "finite_differences" / "smoke"
    for name in ("table.csv", "figure.png", "run.json"):
        assert (folder / name).is_file()
    summary = pd.read_csv(folder / "summary.csv")
    for precision, smallest, largest in (("fp32", 1e-5, 1e-1), ("fp64", 1e-7, 1e-2)):
        curve = summary[(summary.precision == precision) & (summary.step > 0)]
        best = curve.loc[curve.relative_error.idxmin()]
        assert smallest < best.step < largest
        assert curve.relative_error.iloc[0] > 100 * best.relative_error
        assert curve.relative_error.iloc[-1] > 100 * best.relative_error
    assert [result.verdict for result in load_claims(folder)] != []
