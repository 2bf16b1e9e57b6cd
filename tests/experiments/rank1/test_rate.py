"""rank1-rate at smoke scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target(
        "rank1/rate",
        {
            "steps-below-bound": "reproduced",
            "printed-bound": "refuted",
            "nonconvex-steps": "refuted",
            "estimate-indefinite": "reproduced",
        },
    )
    summary = pd.read_csv(folder / "summary.csv")
    convex = summary[summary.objective.str.contains("quadratic|sqrt|logistic")]
    assert (convex.share_singular == 0).all()  # S + α_k I is definite
    assert (convex.share_rising == 0).all()
    assert (convex.growth.dropna() < np.where(convex.n[convex.growth.notna()] == 1, 1.5, 2)).all()
