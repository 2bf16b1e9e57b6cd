"""Table 7, compute: correlations of influence with the Hessian with three responses."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.pbrf.correlations import correlation_tables


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations`, `networks` and `points`, see `correlation_tables`."""
    return correlation_tables(
        run,
        cfg,
        responses=("cold", "warm", "proximal_bregman", "linearised"),
        curvatures=("hessian",),
        printed={"hessian": "Table 7"},
        explained=True,
    )
