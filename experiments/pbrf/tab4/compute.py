"""Table 4, compute: gaps with influence estimates by the Hessian, and its solver error with either matrix."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.runs import Run
from experiments.pbrf.gap_tables import gap_tables


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table` and `points`, see `gap_tables`, and `curvatures`: solver errors by matrix, point by point."""
    found = gap_tables(run, cfg, "hessian", "Table 4")
    other = gap_tables(run, cfg, "gauss_newton", "Table 5")
    curvatures = []
    for curvature, tables in (("hessian", found), ("gauss_newton", other)):
        points = tables["points"]
        solver = points[points.gap == "solver"].drop(columns="gap")
        curvatures.append(solver.assign(curvature=curvature))
    return found | {"curvatures": pd.concat(curvatures, ignore_index=True)}
