"""Table 4, claims: the Hessian's estimate is a little farther from the linearised response, and still near."""

from __future__ import annotations

import numpy as np

from curvlab.influence.responses import GAPS
from curvlab.reporting import ClaimResult, ClaimSheet, bootstrap_interval
from curvlab.reporting import judge as judged
from experiments.pbrf.gap_tables import by_point
from experiments.target import Computed


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; intervals are bootstraps over points (and seeds, where there are several)."""
    generator = np.random.default_rng(computed.config["seed"])
    table, curvatures, results = computed["table"], computed["curvatures"], []

    def ratio(hessian: np.ndarray, gauss_newton: np.ndarray) -> float:
        return float(np.mean(hessian) / np.mean(gauss_newton))

    def share(*columns: np.ndarray) -> float:
        means = [float(np.mean(column)) for column in columns]
        return means[-1] / sum(means)

    for task, own in computed["points"].groupby("task", sort=False):
        row = table[table.task == task].iloc[0]
        both = curvatures[curvatures.task == task].pivot_table(
            index=["seed", "point"], columns="curvature", values="per_example", sort=False
        )
        pair = (both.hessian.to_numpy(), both.gauss_newton.to_numpy())
        gaps = by_point(own)
        columns = tuple(gaps[gap].to_numpy() for gap in GAPS)
        why = (
            f"Mean solver errors: {both.hessian.mean():.2g} with the Hessian (residual {row.residual:.1g}), "
            f"{both.gauss_newton.mean():.2g} with the Gauss-Newton matrix; gradient norm at θ^s "
            f"{row['gradient norm']:.2g}."
        )
        for name, values, statistic in (("solver-error-grows", pair, ratio), ("still-lower", columns, share)):
            interval = bootstrap_interval(values, statistic, generator=generator)
            claim = claims.claim(name, of=str(task))
            results.append(judged(claim, statistic(*values), interval, if_not_reproduced=why))
    return results
