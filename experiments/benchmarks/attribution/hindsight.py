"""The function of one matrix that ranks the halves best, found in hindsight from the very halves that judge it."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from curvlab.influence import linear_datamodelling_score
from experiments.benchmarks.attribution.ranks import predicted_changes

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
        found.append(
            sum((weight * own for weight, own in zip(c, scaled, strict=True)), torch.zeros_like(scaled[0]))
        )
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
