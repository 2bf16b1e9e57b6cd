"""Table 5, compute: gaps with influence estimates by the Gauss-Newton matrix."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.pbrf.gap_tables import gap_tables


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, and `points`, see `gap_tables`."""
    return gap_tables(run, cfg, "gauss_newton", "Table 5")
