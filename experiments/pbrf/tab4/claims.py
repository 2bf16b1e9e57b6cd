"""Table 4, claims: the Hessian's estimate is a little farther from the linearised response, and still near."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from experiments.pbrf.gap_claims import judge_over_seeds, mean_ratio
from experiments.pbrf.gap_tables import by_point

OTHERS = [
    "warm_start",
    "proximity",
    "non_convergence",
]  # the linearisation error is 0.000 in all of the paper's rows


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task over its seeds, see `judge_over_seeds`."""
    generator = np.random.default_rng(computed.config["seed"])
    table, curvatures, results = computed["table"], computed["curvatures"], []
    for task, own in computed["points"].groupby("task", sort=False):
        row, gaps = table[table.task == task].iloc[0], by_point(own)
        both = curvatures[curvatures.task == task]
        pair = _pair(both[~both.definite])[["hessian", "gauss_newton"]]
        why = _state(row, pair, both[both.definite])
        zero = gaps.assign(solver=gaps["moved by linearised"])[["solver", *OTHERS]]
        score = over_smallest(*(zero[name].to_numpy() for name in zero))
        against = ", ".join(
            f"{mean_ratio(gaps.solver.to_numpy(), gaps[gap].to_numpy()):.2g} of {gap}" for gap in OTHERS
        )
        beside = f"{why} The solver error is {against}. An influence of zero would score {score:.2g}."
        for name, columns, statistic, reason in (
            ("solver-error-grows", pair, mean_ratio, why),
            ("grows-only-slightly", pair, mean_ratio, why),
            ("still-lower", gaps[["solver", *OTHERS]], over_smallest, beside),
        ):
            claim = claims.claim(name, of=str(task))
            results.append(judge_over_seeds(claim, row, columns, statistic, reason, generator))
    return results


def over_smallest(solver: np.ndarray, *others: np.ndarray) -> float:
    """Return the mean solver error over the smallest of the other means."""
    return float(np.mean(solver) / min(np.mean(other) for other in others))


def _pair(curvatures: pd.DataFrame) -> pd.DataFrame:
    """Return the solver errors with either matrix, a row for each seed and point."""
    return curvatures.pivot_table(index=["seed", "point"], columns="curvature", values="solver", sort=False)


def _state(row: pd.Series, pair: pd.DataFrame, definite: pd.DataFrame) -> str:
    """Say what the solver errors are made of: the residual, the saddle, and what is left without a saddle."""
    text = (
        f"Mean solver errors: {pair.hessian.mean():.2g} with the Hessian (residual {row.residual:.1g}), "
        f"{pair.gauss_newton.mean():.2g} with the Gauss-Newton matrix; gradient norm at θ^s "
        f"{row['gradient norm']:.2g}. The smallest eigenvalue of the Hessian is {row['smallest eigenvalue']:.2g}, "
    )
    if np.isfinite(row["eigenvalues below -λ"]):
        nearest = row["min |μ + λ|"]
        near = f", and min |μ + λ| is {nearest:.1g}" if np.isfinite(nearest) else ""
        text += (
            f"{row['eigenvalues below -λ']:.0f} of {row.P:.0f} are below -λ{near} (means over seeds): the "
            "estimate is a saddle's, not a minimum's."
        )
    else:
        text += "by Lanczos, from above; the others are not known."
    if len(definite):
        without = _pair(definite)
        ratio, dampings = (
            mean_ratio(without.hessian.to_numpy(), without.gauss_newton.to_numpy()),
            sorted(definite.damping.unique()),
        )
        text += (
            f" At dampings of {', '.join(f'{damping:g}' for damping in dampings)}, where H + λI is definite, the "
            f"two are {without.hessian.mean():.2g} and {without.gauss_newton.mean():.2g}, a ratio of {ratio:.2g}."
        )
    return text
