"""Two-stage leave-one-out beside warm start and PBRF (Bae et al. 2022, App. D.2, Table 8).

make pbrf-tab8 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

Training for longer changes a network that has not converged whether a point is left out or not. Two-stage
leave-one-out subtracts that: the network moves by the difference of two warm-start retrainings in the same
batches, without the point and with it. Columns as in pbrf-tab6; the retrainings are those of pbrf-tab5, with one
more, in which nothing is left out. The table's warm-start and PBRF columns are Table 7's, so its influence is that
with the Hessian; here both curvatures stand, and the Hessian is judged. The paper's estimate is LiSSA, at the
scaling of its list whose correlation with the PBRF is highest; the exact solve and all scalings stand beside it.

The paper does not say at which learning rate the two stages train. C.3 lowers that of the PBRF alone, to a tenth,
so that the two stages would have the base run's, as warm start; but D.2 calls them one more way to the PBRF.
At the base run's rate each goes ten times as far as the PBRF. Both readings are judged as the paper's.

Influence weighs a point by its error at θ^s, two stages by its errors while training goes on: of a point
whose error changes its sign they go against influence, and points.csv tells these points apart.

Which correlation is judged stands in pbrf-tab6, what the Hessian's exact estimate is worth in pbrf-tab7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, Target, out_of_reach
from curvlab.lab import judge as judge_claim
from curvlab.lab.claims import withheld
from curvlab.lab.claims.claims import OUT_OF_REACH
from experiments.pbrf.correlation_plot import draw  # noqa: F401  this target's
from experiments.pbrf.correlations import PAPER, PBRF, Judged, correlation_tables
from experiments.pbrf.responses import EXACT, OWN_LENGTH, Decomposition, rows_of_networks
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Two-stage leave-one-out",
    paper=PAPER | {"bregman_lr_divisor": "10 for the PBRF; of the two stages not stated, here 1 and this"},
    after=("pbrf/tab5", "pbrf/tab7"),
)
PAIRS = {
    "above-warm-start": ("two_stage", "warm"),
    "below-pbrf": (PBRF, "two_stage"),
    "slow-above-warm-start": ("slow_two_stage", "warm"),
    "slow-below-pbrf": (PBRF, "slow_two_stage"),
}
AT_ALL = 0.5  # a mean correlation below which "worse than" compares two that are not there


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations` and `networks`, see `correlation_tables`."""
    tables = correlation_tables(
        run,
        cfg,
        printed={"hessian": "Table 8", "gauss_newton": ""},
        responses=("two_stage", "slow_two_stage", "warm", PBRF),
        explained=False,
    )
    rows = rows_of_networks(run, cfg, _by_point)
    return tables | ({"points": pd.DataFrame(rows)} if rows else {})


def _by_point(points: Decomposition) -> Iterator[dict[str, float]]:
    """Yield of each point its correlations with influence, and whether its error keeps its sign.

    `kept`: the cosine between the gradients of its loss by the outputs, at θ^s and after K/2 epochs more at the
    PBRF's learning rate with nothing left out; with one output, 1 or -1. Influence is the filter of the PBRF's own
    length with the Gauss-Newton matrix; nothing where there is none.
    """
    estimates = points.truncated("gauss_newton")
    if OWN_LENGTH not in estimates:
        return
    predicted = estimates[OWN_LENGTH]["predicted"].double().numpy()
    met = {name: points.loss_changes(name).numpy() for name in ("slow_two_stage", "two_stage", PBRF)}
    before, after = (points.output_gradients(moved) for moved in (None, points.further_trained()))
    kept = torch.nn.functional.cosine_similarity(before.flatten(1), after.flatten(1)).tolist()
    for place, point in enumerate(points.points.tolist()):
        found = {name: stats.pearson(predicted[:, place], changes[:, place]) for name, changes in met.items()}
        yield {"point": point, "kept": kept[place]} | found


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task by the Hessian's influence, as in the table, the other beside it: LiSSA, then exact."""
    tables, results = dict(computed), []  # read once
    for task in tables["table"].task.unique():
        by_hessian, by_other = (Judged(tables, claims, str(task), name) for name in ("hessian", "gauss_newton"))
        for prefix, estimates in {"": (by_hessian.lissa(), by_other.lissa()), "exact-": (EXACT, EXACT)}.items():
            asked = [name for name in PAIRS if f"{prefix}{name}" in claims.entries]
            results += [_judge(by_hessian, by_other, prefix, name, estimates) for name in asked]
        results += [
            by_hessian.correlation("two-stages", "two_stage"),
            by_hessian.correlation("slow-two-stages", "slow_two_stage"),
            by_hessian.difference("lower-rate", "slow_two_stage", "two_stage"),
        ]
        results.append(_judge_cut_off(by_other))
        results += _judge_signs(by_other)
    return results


def _judge_signs(own: Judged) -> list[ClaimResult]:
    """Judge the slow two stages apart: of points whose error keeps its sign in further training, and of others.

    The points of a seed share its network: each seed counts once, by the mean over its points.
    """
    results, none = [], pd.DataFrame(columns=["task", "seed", "kept", "slow_two_stage"])  # see `_by_point`
    points = own.tables.get("points", none).query("task == @own.task")
    for name, such in (("sign-kept", points[points.kept > 0]), ("sign-lost", points[points.kept < 0])):
        claim, values = own.claims.claim(name, of=own.task), such.groupby("seed").slow_two_stage.mean()
        if such.empty:
            results.append(out_of_reach(claim, f"Of {len(points)} points none is such."))
            continue
        why = f"{len(such)} of {len(points)} points; by seed: {', '.join(f'{value:.2f}' for value in values)}."
        results.append(judge_claim(claim, *stats.mean(values), if_not_reproduced=why))
    return results


def _judge_cut_off(own: Judged) -> ClaimResult:
    """Judge how much better than the exact solve LiSSA predicts the PBRF, with the Gauss-Newton matrix."""
    if not any(name.startswith("LiSSA") for name in own.estimates):
        claim = own.claims.claim("exact-below-lissa", of=own.task)
        return out_of_reach(claim, "LiSSA is not computed at this preset.")

    def values(estimate: str, way: str = "over_test") -> pd.Series:
        return own.values(PBRF, way=way, estimate=estimate) - own.values(PBRF, way=way)

    return own.result("exact-below-lissa", values, stats.mean, responses=(PBRF,))


def _judge(
    own: Judged, other: Judged, prefix: str, name: str, estimates: tuple[str | None, str | None]
) -> ClaimResult:
    result = own.difference(f"{prefix}{name}", *PAIRS[name], estimate=estimates[0])
    if estimates[0] is None or result.value is None:
        return result
    first, second = (other.values(response, estimate=estimates[1] or EXACT) for response in PAIRS[name])
    if len(first):
        beside = (
            f"With the Gauss-Newton matrix, by {estimates[1]}: {(first - second).mean():.2f} over test examples."
        )
        result = replace(result, explanation=f"{result.explanation} {beside}")
    largest = max(own.values(response, estimate=estimates[0]).mean() for response in PAIRS[name])
    if name.endswith("below-pbrf") and largest < AT_ALL and result.verdict != OUT_OF_REACH:
        return withheld(result, f"Influence correlates with neither (at most {largest:.2f}).")
    return result
