"""Does the recommendation with C = 2 converge?"""

from __future__ import annotations

import numpy as np

from curvlab.reporting import ClaimResult, ClaimSheet, bootstrap_interval
from curvlab.reporting import judge as judge_claim
from experiments.benchmarks.lissa_recipe.compute import ERROR, RECIPES
from experiments.target import Computed


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the recommendation by the share of cases that it solves; the interval is over cases."""
    table = computed["table"]
    paper, auto = (table[table.recipe == label] for label in RECIPES.values())
    diverged = paper.outcome.str.startswith("diverges")
    converged = ((paper.error_worst < 1) & ~diverged).to_numpy(dtype=float)
    generator = np.random.default_rng(computed.config["seed"])
    interval = bootstrap_interval(converged, lambda values: float(np.mean(values)), generator=generator)
    solved = int((auto.error_worst <= ERROR).sum())
    return [
        judge_claim(
            claims.claim("recommended-hyperparameters"),
            float(converged.mean()),
            interval,
            if_not_reproduced=f"Condition C.1 does not hold with C = 2 there: C measured is "
            f"{auto.constant.min():.1f} to {auto.constant.max():.1f}; with it {solved} of {len(auto)} cases have "
            f"an error of at most {ERROR}.",
        )
    ]
