"""Does the recommendation with C = 2 converge, with uniform batches and with batches drawn by importance?"""

from __future__ import annotations

import numpy as np
from scipy import stats

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Interval, out_of_reach
from curvlab.lab import judge as judge_claim
from experiments.benchmarks.lissa_recipe.compute import ERROR, RECIPES


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge both samplings by the share of cases that they solve; intervals are over cases."""
    table = computed["table"]
    paper, auto, importance = (table[table.recipe == label] for label in RECIPES.values())
    diverged = paper.outcome.str.startswith("diverges")
    converged = ((paper.error_worst < 1) & ~diverged).to_numpy()
    solved = int((auto.error_worst <= ERROR).sum())
    results = [
        judge_claim(
            claims.claim("recommended-hyperparameters"),
            float(converged.mean()),
            _of_share(converged),
            if_not_reproduced=f"Condition C.1 does not hold with C = 2 there: C measured is "
            f"{auto.constant.min():.1f} to {auto.constant.max():.1f}; with it {solved} of {len(auto)} cases have "
            f"an error of at most {ERROR}.",
        )
    ]
    claim = claims.claim("importance-sampling")
    if importance.empty:
        return [*results, out_of_reach(claim, "These tables are from before importance sampling.")]
    answered = (importance.error_worst <= ERROR).to_numpy()
    failed = importance[importance.error_worst > ERROR]
    cases = ", ".join(f"{row.case} {row.error_worst:.2g}" for row in failed.itertuples()) or "none"
    why = f"Errors above {ERROR}: {cases}. |B| is {importance.batch_size.min()} to {importance.batch_size.max()}."
    return [*results, judge_claim(claim, float(answered.mean()), _of_share(answered), if_not_reproduced=why)]


def _of_share(cases: np.ndarray) -> Interval:
    """Return the exact binomial interval of the share of cases: eight of eight are not all that there are."""
    found = stats.binomtest(int(cases.sum()), len(cases)).proportion_ci(0.95, method="exact")
    return Interval(float(found.low), float(found.high), f"Clopper-Pearson 95 %, {len(cases)} cases", len(cases))
