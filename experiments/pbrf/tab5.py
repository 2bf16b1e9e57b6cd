"""Five gaps between influence functions and leave-one-out retraining (Bae et al. 2022, Table 5, Fig. 4).

make pbrf-tab5 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5 damping=0.01"

A network is trained for K epochs. For each of 20 random training points it is trained again without the point:
cold start (same initial weights and batches, then K/2 epochs more), warm start (K/2 epochs from where it is), with
a proximity term, with the proximal Bregman objective, and with that linearised. Beside them stands the influence
estimate. A gap is the distance of two successive ones between the networks' outputs over the training set:
warm-start, proximity, non-convergence, linearisation, solver. `curvlab.influence.retraining` has the objectives.

Where the paper leaves a choice: its table says "L2 distance between the networks' outputs"; ours stands divided
by √N, and as it is (where only a part of the training set is compared, `gap_examples`, per example times √N).
Outputs are logits, or predictions. Leaving out is a weight of 0 in sums that are divided by N, also in a
minibatch. The L2 term belongs to the cost: its Bregman divergence adds to the damping, and it adds to the
curvature. The Bregman objectives see their point at every step (the others when it is in the batch), at a tenth
of the learning rate. Retrainings go on with the base run's schedule: on CIFAR-10 their rates are those after all
three decays. Momentum and Adam's averages start from zero at θ^s, but run through in the cold start: that is in
the warm-start gap. Learning rates with a grid are chosen by validation loss, in the convolutional rows by
validation accuracy.

Influence is solved by block conjugate gradients where the paper has LiSSA: "solver" is then how far SGD on the
linearised objective is from its minimum. Residuals: `embedded` 1e-6 (convolutional network and Transformer 1e-4);
`laptop` 1e-4 (regressions, logistic regression, MNIST's MLP), else 1e-2 to 1e-1. Beside it, at `laptop`, of
Concrete and Energy stands LiSSA of the whole matrix (`solvers.series`), at the smallest of the paper's scalings at
which it is finite: the paper's claim and cell are judged by it, ours by the exact solve. `paper` has LiSSA of
batches alone. `arrived` says which rows decide nothing: that learned nothing, whose estimate is not solved, or
whose retraining has hardly begun.

An autoencoder's loss is the mean over pixels, where Martens & Grosse (2015), whose set-up the paper takes, have
the sum: λ and the L2 term are 784 times (64 times for digits) as strong beside it as they would be beside a sum.
Its weights start as `SigmoidMLP` has it, since the default start learns nothing but the mean image; the paper
does not state its own. A point of the Penn Treebank is a sequence of 35 tokens of a byte-pair encoding of
10,000.

`embedded` has stand-ins: scikit-learn's diabetes (a regression) for Concrete and Energy, and, split at its median,
for the Pima table; 500 digits for MNIST, with a ConvNet for LeNet; 40 paragraphs of scikit-learn's documentation
in sequences of 32 tokens for the Penn Treebank. Breast cancer is the paper's. Claims are judged by geometric means
over seeds and their t intervals: the points of one seed share a network and its drift. There, autoencoder,
ConvNet and Transformer have 2 or 3 points a seed, not 20, and the last two one seed, which decides nothing.

Misprints: Eq. 39 and 44 lack ½ (with 2 G Eq. 46 would not follow), Eq. 30 prints the norm of the proximity term
without its square, Eq. 48 and 49 must start at t = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from curvlab.influence.retraining import GAPS
from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, Target, exact, t_interval
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims import withheld
from curvlab.lab.claims.intervals import MIN_SAMPLES
from experiments.pbrf.gaps import (
    LISSA,
    SOLVER_BY_LISSA,
    arrived,
    arrived_row,
    by_point,
    draw,  # noqa: F401  this target's
    explained,
    gap_tables,
    judge_over_seeds,
    mean_ratio,
)

TARGET = Target(
    __name__,
    title="Five gaps between influence and retraining",
    paper={
        "num_points": 20,
        "seeds": "not stated",
        "damping": "0.001, Transformer 0.01",
        "bregman_lr_divisor": 10,
        "table.csv:epochs": "1000 (MLP, autoencoder), 200 (convolutional), 10 (Transformer)",
        "influence.gauss_newton._target_": "LiSSA, depth 5000 or 10000, 5 repeats",
    },
    digits={"points": 5},  # a row for each point and gap
)
LOGISTIC = ("no-gaps", "small-against-estimate")
CELL = "cell-agrees"
PAPER_EPOCHS = 1000  # of its MLPs and its autoencoder, whose rows are compared number by number
ROUNDING = 0.0005  # of the paper's digits
BY_LISSA = "answers-another-question"  # the paper's; exact-... is ours
NO_LISSA = "LiSSA is not computed beside its exact solve."
NETWORKS = (f"exact-{BY_LISSA}", "influence-is-the-pbrf", "solver-reaches-it", "linearisation-small")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, `points` and `networks`, see `gap_tables`."""
    return gap_tables(run, cfg, "gauss_newton", "Table 5")


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task over its seeds, see `judge_over_seeds`."""
    table, results = computed["table"], []
    for task, own in computed["points"].groupby("task", sort=False):
        row, gaps = table[table.task == task].iloc[0], by_point(own)
        judge_task = _logistic if row.epochs == 0 else _network
        results += judge_task(claims, str(task), gaps, row)
        if row["paper's row"] and row.epochs >= PAPER_EPOCHS and row.seeds >= MIN_SAMPLES and not arrived_row(row):
            results += [_cell(claims, row, gap, gaps) for gap in GAPS]
    reasons = dict.fromkeys((*LOGISTIC, BY_LISSA, *NETWORKS, CELL), "This preset has no such task.")
    for name, reason in (reasons | {f"exact-{BY_LISSA}": "This preset has no exact solve."}).items():
        if not any(result.claim.id.startswith(f"{name}-") for result in results):
            results.append(claims.unjudged(name, reason, zero="unknown size"))
    return results


def share_of_errors(*gaps: np.ndarray) -> float:
    """Return the share of linearisation and solver, the last two of five, in the sum of the means."""
    means = [float(np.mean(gap)) for gap in gaps]
    return sum(means[3:]) / sum(means)


def errors_against_estimate(linearisation: np.ndarray, solver: np.ndarray, moved: np.ndarray) -> float:
    """Return both errors over how far the estimate moves the outputs, in means."""
    return mean_ratio(linearisation + solver, moved)


def largest(*values: np.ndarray) -> float:
    """Return the largest of the means."""
    return float(max(np.mean(column) for column in values))


def largest_against(*values: np.ndarray) -> float:
    """Return the largest of the means but the last, over the last."""
    return largest(*values[:-1]) / float(np.mean(values[-1]))


def _logistic(claims: ClaimSheet, task: str, gaps: pd.DataFrame, row: pd.Series) -> list[ClaimResult]:
    why = (
        f"Mean gaps: {_listed(gaps)}; the estimate moves the outputs by {row.moved:.2g}. A weight of 1/N is not "
        "infinitesimal, and linearisation is exact to first order only."
    )
    judged = partial(judge_over_seeds, reason=arrived_row(row), why=why)
    first, second = (claims.claim(name, of=task) for name in LOGISTIC)
    return [
        judged(first, columns=gaps[[*GAPS]], statistic=largest),
        judged(second, columns=gaps[[*GAPS, "moved"]], statistic=largest_against),
    ]


def _network(claims: ClaimSheet, task: str, gaps: pd.DataFrame, row: pd.Series) -> list[ClaimResult]:
    nothing = gaps.assign(solver=gaps["moved by linearised"])
    zero = f"{share_of_errors(*(nothing[gap].to_numpy() for gap in GAPS)):.2g}"
    state = (
        f"At θ^s the gradient norm is {row['gradient norm']:.2g}, the training loss {row['train loss']:.3g} "
        f"(constant outputs: {row['constant loss']:.3g}). Mean gaps: {_listed(gaps)}; the estimate moves the "
        f"outputs by {row.moved:.2g}, the PBRF by {row['moved by PBRF']:.2g}, its linearisation by "
        f"{row['moved by linearised']:.2g}. An influence of zero would have a share of {zero}."
    )
    few = (
        f"{row.epochs / 2:g} epochs at a lower learning rate end before the directions of small curvature have "
        "moved: a small gap is not a solved problem."
    )
    statistics: dict[str, tuple[list[str], Callable[..., float], str]] = {
        BY_LISSA if row.get("estimate") == LISSA else f"exact-{BY_LISSA}": ([*GAPS], share_of_errors, state),
        "influence-is-the-pbrf": (["linearisation", "solver", "moved"], errors_against_estimate, f"{state} {few}"),
        "solver-reaches-it": (["solver", "moved"], mean_ratio, f"{state} {few}"),
        "linearisation-small": (["linearisation", "moved by PBRF"], mean_ratio, state),
    }
    results = [
        judge_over_seeds(claims.claim(name, of=task, zero=zero), arrived_row(row), gaps[columns], measure, why)
        for name, (columns, measure, why) in statistics.items()
    ]
    if _lissa_beside(row):
        errors = gaps[[*list(GAPS)[:-1], SOLVER_BY_LISSA]]
        solver, moved = (gaps[f"{name} by LiSSA"].mean() for name in ("solver", "moved"))
        why = f"By {_lissa_beside(row)}: solver {solver:.2g}, moving the outputs by {moved:.2g}. Exact: {state}"
        reason = arrived(learned=bool(row.learned), is_exact=False)
        claim = claims.claim(BY_LISSA, of=task, zero=zero)
        results.append(judge_over_seeds(claim, reason, errors, share_of_errors, why))
    elif row.get("estimate") != LISSA:
        reason = "LiSSA is not finite in every seed." if SOLVER_BY_LISSA in gaps else NO_LISSA
        results.append(claims.unjudged(BY_LISSA, reason, of=task, zero=zero))
    return results


def _lissa_beside(row: pd.Series) -> str:
    """Return the names of the LiSSA that stands beside the exact solve; "" unless every seed has one."""
    named = row.get("LiSSA beside")
    return named if isinstance(named, str) else ""


def _cell(claims: ClaimSheet, row: pd.Series, gap: str, gaps: pd.DataFrame) -> ClaimResult:
    """Judge how far the paper's number lies outside our interval, rounding left aside; the solver's by LiSSA."""
    by_lissa = gap == "solver" and _lissa_beside(row)
    of_seeds, printed = gaps[SOLVER_BY_LISSA if by_lissa else gap].groupby("seed").mean(), row[f"{gap} paper mean"]
    mean, ends = of_seeds.mean(), t_interval(of_seeds)
    is_near = abs(mean - printed) <= ROUNDING
    value = 0.0 if is_near else max(ends.low - printed - ROUNDING, printed - ends.high - ROUNDING, 0.0)
    why = (
        f"Ours: {mean:.3g}, t 95 % over {len(of_seeds)} seeds {ends.low:.3g} to {ends.high:.3g}; the paper's: "
        f"{printed:.3f}."
    )
    claim = claims.claim(CELL, of=f"{gap.replace('_', '-')}-{row.task}")
    interval = exact(value, kind=f"deterministic, from a t interval over {len(of_seeds)} seeds")
    result = explained(judge_claim(claim, value, interval, if_not_reproduced=why), why)
    zero = gaps["moved by linearised"].mean()
    if gap == "solver" and not by_lissa and row.get("estimate") != LISSA:
        reason = f"The paper's solver is LiSSA, cut off; ours is solved to a residual of {row.residual:.2g}."
        return withheld(result, reason)
    if gap == "solver" and abs(zero - printed) <= ROUNDING:
        return withheld(result, f"An influence of zero, with {zero:.3g}, rounds to it, too.")
    if value == 0 and not is_near and ends.low <= ROUNDING:
        return withheld(result, "Our interval is too wide to tell: it would hold a zero.")
    return result


def _listed(gaps: pd.DataFrame) -> str:
    return ", ".join(f"{gap} {gaps[gap].mean():.2g}" for gap in GAPS)
