"""What scores miss of a retraining, one approximation less after another: one matrix, the run, its order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from curvlab.influence import DatamodellingScore, linear_datamodelling_score
from curvlab.influence.bank import BankScore
from experiments.benchmarks.attribution.methods import DOT, FILTER, INFLUENCE, RUN_DAMPING, SEGMENTS, UNROLLED
from experiments.benchmarks.attribution.ranks import predicted_changes

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
    chain = {FILTER: scores[FILTER][0], BEST: best_combination(functions, subsets, losses[0])}
    chain |= {name: scores[name][0] for name in (SEGMENTS, UNROLLED)}
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


# ------------------------------------------------------------------------------------ hindsight
# The function of one matrix that ranks the halves best, found in hindsight from the very halves that judge it.
MAX_CONDITION = 1e4  # of the functions' predictions: what is nearer to dependent is rounding of single precision


def best_combination(functions: list[Tensor], subsets: Tensor, losses: Tensor) -> Tensor:
    """Return the linear combination of scores, all (M, N), with the highest LDS that a search finds.

    Scores by functions f_j(G) of one matrix add up to those by sum_j c_j f_j(G), with the same c for every
    query: resolvents of many dampings span the smooth functions of G. The search maximises the mean over
    queries of Pearson's correlation with the ranks of the losses, from each single function, by L-BFGS; of its
    ends and of the single functions that with the highest LDS is returned, so that none of them is above it. It
    is fitted to the halves that judge it: on other halves no function of G in the span is expected to be as
    good. SOURCE and the exact derivative are not in this span, and may be above it.

    Args:
        functions: (M, N) each.
        subsets: (S, N), of random halves.
        losses: after retraining on them, (S, M).
    """
    aim = _standardised(torch.from_numpy(_column_ranks(losses)))
    # Resolvents differ by orders of magnitude.
    scaled = [own.double() / own.double().norm().clamp(min=1e-300) for own in functions]
    predicted = torch.stack([_centred(predicted_changes({"scores": own}, subsets)).cpu() for own in scaled])
    basis = _independent(predicted.flatten(1))  # (K, J): c = coordinates @ basis
    mixed = torch.einsum("kj,jsm->ksm", basis, predicted)

    def loss_and_gradient(coordinates: np.ndarray) -> tuple[float, np.ndarray]:
        c = torch.from_numpy(coordinates).requires_grad_()
        value = -(_standardised(torch.einsum("k,ksm->sm", c, mixed)) * aim).sum(0).mean()
        (gradient,) = torch.autograd.grad(value, c)
        return float(value.detach()), gradient.numpy()

    found = list(scaled)
    backward = torch.linalg.pinv(basis)
    for start in backward:  # the coordinates of each single function
        end = minimize(loss_and_gradient, start.numpy(), jac=True, method="L-BFGS-B").x
        c = torch.from_numpy(end) @ basis
        parts = (weight * own for weight, own in zip(c, scaled, strict=True))
        found.append(sum(parts, torch.zeros_like(scaled[0])))
    return max(found, key=lambda own: linear_datamodelling_score(own, subsets, losses, num_resamples=1).value)


def _column_ranks(losses: Tensor) -> np.ndarray:
    order = losses.double().cpu().numpy().argsort(0).argsort(0)
    return order.astype(float)


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _standardised(values: Tensor) -> Tensor:
    """Return columns of mean 0 and norm 1."""
    centred = _centred(values)
    return centred / centred.norm(dim=0).clamp(min=1e-300)


def _independent(rows: Tensor) -> Tensor:
    """Return combinations of the rows that are orthonormal, (K, J), without those that are nearly 0."""
    u, sizes, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = sizes > sizes[0] / MAX_CONDITION
    return (u[:, kept] / sizes[kept]).T
