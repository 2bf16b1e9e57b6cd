"""By which probabilities to draw examples, and what that guarantees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature.example_rows import own_gauss_newton
from curvlab.curvature.example_traces import exact_traces, sampled_traces
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.importance import certified_constant, importance_probabilities
from curvlab.curvature.mean_over_ranks import MeanOverRanks
from curvlab.linalg import DenseOperator, LinearOperator

_FLOOR = 0.01  # of the mean trace: no weight exceeds 100 times that of uniform sampling
_UNIFORM = 0.1  # share of the uniform distribution where traces are estimates
_MOST_OUTPUTS = 100  # exact traces cost (1 + C) forwards: beyond, estimates are cheaper than what they save


@dataclass(frozen=True)
class ExampleImportance:
    """Probabilities for `op.sample(batch_size, generator, weights)`.

    Attributes:
        probabilities: q, (N,), fp64.
        traces: tr(G_i), (N,), exact or estimated.
        constant: no C of condition C.1 is larger for batches drawn by q; None where traces are estimates.
        num_matvecs: what finding them cost, in products with G.
    """

    probabilities: Tensor
    traces: Tensor
    constant: float | None
    num_matvecs: int


def example_importance(operator: LinearOperator, *, generator: torch.Generator | None = None) -> ExampleImportance:
    """Return q_i ∝ max(tr(G_i), 0.01 mean), for which C <= 1.01 (`certified_constant`).

    Where parameters lie beyond linear and convolutional layers, or an example has more than 100 outputs or is a
    sequence, tr(G_i) is estimated by one random gradient of each example, and q_i ∝ the estimate, mixed with a
    tenth of the uniform distribution: no certificate, for an estimate may be small by chance.

    Args:
        operator: GaussNewtonOperator of the whole data, also spread over processes (DataParallelOperator), or a
            DenseOperator of N matrices.
        generator: of the estimates.

    Cost: (1 + C) / 5 products for C outputs; one product for estimates.
    """
    if isinstance(operator, DenseOperator) and operator.examples is not None:
        return _certified(operator.examples.diagonal(dim1=1, dim2=2).sum(1).double().cpu(), 0)
    if not isinstance(operator, GaussNewtonOperator | MeanOverRanks):
        raise TypeError(
            f"importance sampling draws by tr(G_i), which {type(operator).__name__} does not tell: pass a "
            "GaussNewtonOperator without damping, and the damping as a number, or sampling='uniform'"
        )
    num_outputs = _num_outputs(own_gauss_newton(operator))
    if num_outputs is not None and num_outputs <= _MOST_OUTPUTS:
        try:
            return _certified(exact_traces(operator), math.ceil((1 + num_outputs) / 5))
        except ValueError:  # parameters beyond linear and convolutional layers
            pass
    traces = sampled_traces(operator, generator=generator)
    return ExampleImportance(importance_probabilities(traces, uniform=_UNIFORM), traces, None, 1)


def _certified(traces: Tensor, num_matvecs: int) -> ExampleImportance:
    q = importance_probabilities(traces, floor=_FLOOR)
    return ExampleImportance(q, traces, certified_constant(traces, q), num_matvecs)


def _num_outputs(operator: GaussNewtonOperator) -> int | None:
    """Return how many outputs an example has; None for sequences of predictions."""
    inputs, _ = next(iter(operator.sample(1, torch.Generator().manual_seed(0)).batches))
    with torch.no_grad():
        outputs = operator.function(operator.function.parameters, inputs)
    return int(outputs.shape[1]) if outputs.ndim == 2 else None
