"""What scores miss of a retraining, one approximation after another: one matrix, the run, its order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlab.influence import DatamodellingScore, linear_datamodelling_score
from experiments.benchmarks.attribution.methods import DOT, FILTER, INFLUENCE, RUN_DAMPING, SEGMENTS, UNROLLED

CLOSEST = "closest function of the matrix"
PART_WAY, OTHER_ORDER = "retraining, weights moved part of the way", "retraining in another order"
FUNCTIONS = (DOT, INFLUENCE, RUN_DAMPING, FILTER)  # of the Gauss-Newton matrix at the end, one for each damping
NEEDED = (*FUNCTIONS, SEGMENTS, UNROLLED)
# Predictor, and what it still lacks: each is what the next one adds.
LACKS = {
    FILTER: "the best function of the matrix",
    CLOSEST: "change of the Gauss-Newton matrix on the way",
    SEGMENTS: "non-convexity: Hessians, step by step",
    UNROLLED: "effects beyond the first order (linearisation)",
    PART_WAY: "the rest of the way",
    OTHER_ORDER: "the order of the batches",
}


def rest_rows(
    scores: dict[str, list[Tensor]], subsets: Tensor, losses: Tensor, part_way: Tensor
) -> list[dict[str, Any]]:
    """Return the LDS of each predictor in `LACKS`, halves in the order of the scored network.

    `lds` is against retraining on the halves, `lds_part_way` against retraining with weights 1 + share (w - 1), a
    part of the way to them: there a first-order answer has less to miss.

    Args:
        scores: (M, N), by method: for each of `NEEDED` one or more.
        subsets: (S, N).
        losses: (R, S, M), after retraining on the subsets in R orders, the scored one first.
        part_way: (S, M), after retraining part of the way to them.
    """
    unrolled = scores[UNROLLED][0]
    functions = [own for method in FUNCTIONS for own in scores.get(method, [])]
    chain = {
        FILTER: scores[FILTER][0],
        CLOSEST: closest_combination(functions, unrolled),
        SEGMENTS: scores[SEGMENTS][0],
        UNROLLED: unrolled,
    }
    rows = []
    for name, own in chain.items():
        whole, part = (linear_datamodelling_score(own, subsets, target) for target in (losses[0], part_way))
        rows.append(_row(name, whole) | _columns("lds_part_way", part))
    rows.append(_row(PART_WAY, prediction_score(part_way, losses[0])))
    if len(losses) > 1:
        rows.append(_row(OTHER_ORDER, prediction_score(losses[1], losses[0])))
    return rows


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


def closest_combination(functions: list[Tensor], target: Tensor) -> Tensor:
    """Return the linear combination of scores that comes closest to a target, all (M, N), by least squares.

    Scores by functions f_j(G) of one matrix add up to those by sum_j c_j f_j(G): resolvents of many dampings span
    the smooth functions of G. Constants of a query, which no LDS sees, are left out; all queries weigh the same.
    """
    centred = [(own - own.mean(1, keepdim=True)).double() for own in (*functions, target)]
    spread = centred[-1].norm(dim=1, keepdim=True).clamp(min=1e-300)
    sizes = [own.norm().clamp(min=1e-300) for own in centred[:-1]]  # resolvents differ by orders of magnitude
    columns = torch.stack([(own / size / spread).flatten() for own, size in zip(centred, sizes, strict=False)], 1)
    aim = (centred[-1] / spread).flatten()[:, None]
    # gelsd drops what is dependent to rounding of single precision, in which scores are computed.
    weights = torch.linalg.lstsq(columns.cpu(), aim.cpu(), rcond=1e-6, driver="gelsd").solution.flatten()
    terms = zip(weights.to(target.device), functions, sizes, strict=True)
    return torch.stack([weight * own.double() / size for weight, own, size in terms]).sum(0)


def _row(name: str, found: DatamodellingScore) -> dict[str, Any]:
    return {"predictor": name, "still lacks": LACKS[name], **_columns("lds", found)}


def _columns(prefix: str, found: DatamodellingScore) -> dict[str, float]:
    return {prefix: found.value, f"{prefix}_low": found.low, f"{prefix}_high": found.high}
