"""What scores miss of a retraining, one approximation less after another: one matrix, the run, its order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlab.influence import DatamodellingScore, linear_datamodelling_score
from curvlab.influence.bank import BankScore
from experiments.benchmarks.attribution.hindsight import best_combination
from experiments.benchmarks.attribution.methods import DOT, FILTER, INFLUENCE, RUN_DAMPING, SEGMENTS, UNROLLED

BEST = "best function of the matrix, in hindsight"
PART_WAY, OTHER_ORDER = "retraining, weights moved part of the way", "retraining in another order"
FUNCTIONS = (DOT, INFLUENCE, RUN_DAMPING, FILTER)  # of the Gauss-Newton matrix at the end, one for each damping
NEEDED = (*FUNCTIONS, SEGMENTS, UNROLLED)
# Predictor, and what it still lacks.
LACKS = {
    FILTER: "another function of the same matrix",
    BEST: "whatever is not in the matrix at the end; it is fitted to these halves",
    SEGMENTS: "Hessians in place of Gauss-Newton matrices, step by step",
    UNROLLED: "effects beyond the first order (linearisation)",
    PART_WAY: "the rest of the way",
    OTHER_ORDER: "the order of the batches",
}


def rest_rows(
    scores: dict[str, list[Tensor]], subsets: Tensor, losses: Tensor, part_way: dict[float, Tensor]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the LDS of each predictor in `LACKS`, halves in the order of the scored network; and over the way.

    Of the first rows `lds` is against retraining on the halves, `lds_part_way` against retraining with weights
    1 + share (w - 1), the smallest share of the way to them: there a first-order answer has least to miss. The
    second rows have the LDS of each predictor that adds up scores, for each share, the whole way (1) included.

    Args:
        scores: (M, N), by method: for each of `NEEDED` one or more.
        subsets: (S, N).
        losses: (R, S, M), after retraining on the subsets in R orders, the scored one first.
        part_way: (S, M) by share, after retraining part of the way to them.
    """
    functions = [own for method in FUNCTIONS for own in scores.get(method, [])]
    chain = {
        FILTER: scores[FILTER][0],
        BEST: best_combination(functions, subsets, losses[0]),
        SEGMENTS: scores[SEGMENTS][0],
        UNROLLED: scores[UNROLLED][0],
    }
    nearest, rows, way = min(part_way), [], []
    for name, own in chain.items():
        found = {
            share: linear_datamodelling_score(own, subsets, target)
            for share, target in sorted((part_way | {1.0: losses[0]}).items())
        }
        rows.append(_row(name, found[1.0]) | columns(found[nearest], "lds_part_way"))
        way += [{"predictor": name, "share": share} | columns(each) for share, each in found.items()]
    rows.append(_row(PART_WAY, prediction_score(part_way[nearest], losses[0])))
    if len(losses) > 1:
        rows.append(_row(OTHER_ORDER, prediction_score(losses[1], losses[0])))
    return rows, way


def prediction_score(predicted: Tensor, losses: Tensor) -> DatamodellingScore:
    """Return the LDS of predictions for whole subsets, (S, M), where there are no scores to add up.

    Args:
        predicted: any increasing function of the losses, (S, M).
        losses: measured, (S, M), or (R, S, M) for R seeds.
    """
    # sum_i (w_i - 1) / S · score_i is the prediction itself with S examples, and weights 1 + S for one of them.
    size = len(predicted)
    weights = 1 + size * torch.eye(size, dtype=torch.float64)
    return linear_datamodelling_score(predicted.T, weights, losses)


def _row(name: str, found: DatamodellingScore) -> dict[str, Any]:
    return {"predictor": name, "still lacks": LACKS[name], **columns(found)}


def columns(found: DatamodellingScore | BankScore, name: str = "lds") -> dict[str, float]:
    """Return a value with its interval as columns of a row."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
