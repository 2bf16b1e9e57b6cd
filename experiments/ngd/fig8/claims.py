"""Fig. 8: NGD overfits, its WBIC increases meanwhile, and with the validation loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ngd.fig8.plot import wbic_complexity
from experiments.ngd.overfitting.last_epoch import judge_sign
from experiments.ngd.overfitting.measures import judge_increases, judge_overfits, overfitted, why_none


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge NGD on each task; intervals are over seeds."""
    table, results = computed["table"], []
    for task, since in computed["summary"].groupby("task", sort=False):
        terms, of_task = _terms(table[table.task == task]), str(task)
        results += [
            judge_overfits(claims.claim("overfits-ngd", of=of_task), since, "ngd"),
            judge_increases(claims.claim("wbic-increases-ngd", of=of_task), since, "ngd", "wbic", terms),
            judge_sign(claims.claim("wbic-sign-ngd", of=of_task), table[table.task == task], "ngd", "wbic"),
            _follows_validation_loss(claims.claim("wbic-follows-validation-loss-ngd", of=of_task), since, terms),
        ]
    return results


def _follows_validation_loss(claim: Claim, since: pd.DataFrame, terms: str) -> ClaimResult:
    used = overfitted(since, "ngd", "wbic").dropna(subset="rank_correlation")
    if (lacking := why_none(since, "ngd", used)) is not None:
        return out_of_reach(claim, lacking)
    values = used.rank_correlation.to_numpy()
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=terms)


def _terms(table: pd.DataFrame) -> str:
    """Return how the two terms of WBIC = n L(w*) + LLC ln n change under NGD, from the minimum to the end."""
    fits, complexities = [], []
    for _, own in table[table.optimizer == "ngd"].groupby("seed"):
        ordered = own.sort_values("epoch")
        ends = ordered.loc[[ordered.validation_loss.idxmin(), ordered.index[-1]]]
        complexity = wbic_complexity(ends).to_numpy()
        fit = ends.wbic.to_numpy() - complexity
        fits.append(fit[1] - fit[0])
        complexities.append(complexity[1] - complexity[0])
    return (
        f"From the minimum of the validation loss to the end n L(w*) changes by {np.mean(fits):+.4g} nats, and "
        f"LLC ln n by {np.mean(complexities):+.4g} (every estimate, valid or not): their sum is the WBIC."
    )
