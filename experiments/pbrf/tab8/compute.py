"""Table 8, compute: correlations of influence with two-stage leave-one-out, warm start and PBRF."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.pbrf.correlations import correlation_tables


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations` and `networks`, see `correlation_tables`."""
    return correlation_tables(
        run,
        cfg,
        responses=("two_stage", "warm", "proximal_bregman"),
        curvatures=("hessian", "gauss_newton"),
        printed={"hessian": "Table 8"},
    )
