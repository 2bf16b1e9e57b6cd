"""Two-stage leave-one-out beside warm start and PBRF (Bae et al. 2022, App. D.2, Table 8).

make pbrf-tab8 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

Training for longer changes a network that has not converged whether a point is left out or not. Two-stage
leave-one-out subtracts that: the network moves by the difference of two warm-start retrainings in the same
batches, without the point and with it. Columns as in pbrf-tab6; the retrainings are those of pbrf-tab5, with one
more, in which nothing is left out. The table's warm-start and PBRF columns are Table 7's, so its influence is that
with the Hessian; here both curvatures stand, and the Hessian is judged. The paper's estimate is LiSSA, at the
scaling of its list whose correlation with the PBRF is highest; the exact solve and all scalings stand beside it.

Which correlation the paper means it does not say; see `correlation_tables`. Judged: for each left-out point over
the test examples, then the mean over the points; intervals are over seeds, which change the initial weights, the
batches and the points; fewer than three decide nothing.

H + λI is not definite at a network that has not converged: solved exactly, influence with it is no minimum of the
PBRF, linearised or not (Eq. 46 holds for G alone), and where an eigenvalue of H lies near -λ, its direction
dominates. LiSSA predicts the PBRF there only at scalings so large that its steps end before such directions grow.
networks.csv counts the eigenvalues below -λ.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, Target
from curvlab.lab.reporting.claims import OUT_OF_REACH
from experiments.pbrf.correlations import PAPER, PBRF, Judged, correlation_tables
from experiments.pbrf.responses import EXACT

TARGET = Target(
    __name__,
    title="Two-stage leave-one-out",
    paper=PAPER,
    draw="experiments.pbrf.correlation_plot:draw",
    after=("pbrf/tab5", "pbrf/tab7"),
)
PAIRS = {"above-warm-start": ("two_stage", "warm"), "below-pbrf": (PBRF, "two_stage")}
AT_ALL = 0.5  # a mean correlation below which "worse than" compares two that are not there


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations` and `networks`, see `correlation_tables`."""
    return correlation_tables(
        run,
        cfg,
        responses=("two_stage", "warm", PBRF),
        curvatures=("hessian", "gauss_newton"),
        printed={"hessian": "Table 8"},
    )


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task by the Hessian's influence, as in the table, the other beside it: LiSSA, then exact."""
    tables, results = dict(computed), []
    for task in tables["table"].task.unique():
        by_hessian, by_other = (Judged(tables, claims, str(task), name) for name in ("hessian", "gauss_newton"))
        for prefix, estimates in {"": (by_hessian.lissa(), by_other.lissa()), "exact-": (EXACT, EXACT)}.items():
            results += [_judge(by_hessian, by_other, prefix, name, estimates) for name in PAIRS]
    return results


def _judge(
    own: Judged, other: Judged, prefix: str, name: str, estimates: tuple[str | None, str | None]
) -> ClaimResult:
    result = own.difference(f"{prefix}{name}", *PAIRS[name], estimate=estimates[0])
    if estimates[0] is None:
        return result
    first, second = (other.values(response, estimate=estimates[1] or EXACT) for response in PAIRS[name])
    if len(first):
        beside = (
            f"With the Gauss-Newton matrix, by {estimates[1]}: {(first - second).mean():.2f} over test examples."
        )
        result = replace(result, explanation=f"{result.explanation} {beside}")
    largest = max(own.values(response, estimate=estimates[0]).mean() for response in PAIRS[name])
    if name == "below-pbrf" and largest < AT_ALL and result.verdict != OUT_OF_REACH:
        reason = f"Influence correlates with neither (at most {largest:.2f})."
        return replace(result, verdict=OUT_OF_REACH, explanation=f"{reason} {result.explanation}")
    return result
