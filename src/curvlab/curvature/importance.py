"""Importance sampling of examples: batches in which few examples with much curvature cannot do harm."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from curvlab.arguments import real, tensor
from curvlab.curvature.examples import (
    exact_traces,
    has_exact_traces,
    own_gauss_newton,
    sampled_traces,
)
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.operator import MeanOverRanks
from curvlab.linalg import DenseOperator, DerivedOperator, ExampleDraws, LinearOperator
from curvlab.shown import Shown, Summary, counted

_FLOOR = 0.01  # of the mean trace: no weight exceeds 100 times that of uniform sampling
_UNIFORM = 0.1  # share of the uniform distribution where traces are estimates
_MOST_OUTPUTS = 100  # exact traces cost (1 + C) forwards: beyond, estimates are cheaper than what they save


def importance_probabilities(scores: Tensor, *, floor: float = 0.0, uniform: float = 0.0) -> Tensor:
    """Return q_i = (1 - uniform) max(s_i, floor · mean s) / Σ max(...) + uniform / N, (N,), fp64.

    With s_i = tr(G_i), q keeps C of condition C.1 at most (1 + floor) / (1 - uniform), see `certified_constant`:
    the sum of all max(...) is at most (1 + floor) N tr(G). Where s_i is an estimate that may be 0 by chance, floor
    or uniform must be positive.

    Args:
        scores: s_i >= 0: exact or estimated traces, or output curvatures.
        floor: ε.
        uniform: share of the uniform distribution.
    """
    if tensor("scores", scores).ndim != 1 or not bool((scores >= 0).all()) or not bool(scores.isfinite().all()):
        raise ValueError("scores must be (N,), finite and not negative: traces of the examples' matrices")
    floor, uniform = real("floor", floor), real("uniform", uniform)
    if not 0 <= floor < math.inf or not 0 <= uniform <= 1:
        raise ValueError(f"floor must be at least 0 and uniform between 0 and 1, got {floor} and {uniform}")
    scores = scores.detach().double().cpu()
    raised = scores.clamp(min=floor * float(scores.mean()))
    if float(raised.sum()) == 0:  # no curvature anywhere: nothing to tell examples apart by
        raised = torch.ones_like(raised)
    return (1 - uniform) * raised / raised.sum() + uniform / len(raised)


def certified_constant(traces: Tensor, probabilities: Tensor) -> float:
    """Return max_i tr(G_i) / (N q_i tr(G)): no C of condition C.1 is larger, for batches drawn by q.

    Klochkov & Liu (2024) ask for E H̃² - H² ⪯ C/|B| tr(H) H. One example drawn by q gives H̃ = G_i / (N q_i), with
    E H̃ = Σ q_i G_i / (N q_i) = G. For a positive semi-definite G_i, G_i² ⪯ λmax(G_i) G_i ⪯ tr(G_i) G_i, so

        E H̃² = Σ q_i G_i² / (N q_i)² ⪯ 1/N Σ [tr(G_i) / (N q_i)] G_i ⪯ max_i [tr(G_i) / (N q_i)] · G,

    and a mean over |B| independent draws divides E H̃² - G² ⪯ E H̃² by |B|. With q_i ∝ tr(G_i) every bracket is
    tr(G): E H̃² ⪯ tr(G) G, condition C.1 with C = 1 for any network whose traces are exact. Uniform sampling has
    max_i tr(G_i) / tr(G). The argument is that of Strohmer & Vershynin (2009) for the randomised Kaczmarz method
    and of Needell, Srebro & Ward (2014) for SGD: their largest Lipschitz constant becomes the mean one.

    Args:
        traces: tr(G_i) or upper bounds of them, (N,), whose mean is tr(G).
        probabilities: q, (N,).

    Infinite where q_i = 0 and tr(G_i) > 0: such a q is biased.
    """
    traces, probabilities = traces.double().cpu(), probabilities.double().cpu()
    if traces.shape != probabilities.shape:
        raise ValueError(f"got {len(traces)} traces and {len(probabilities)} probabilities")
    needed = traces > 0
    if not bool(needed.any()):
        return 0.0
    ratios = traces[needed] / (len(traces) * probabilities[needed])
    return float(ratios.max() / traces.mean())


class ImportanceOperator(DerivedOperator):
    """G, whose batches draw example i with probability q_i and weigh it by 1 / (N q_i): unbiased for G.

    G_t = 1/|B| Σ_b G_{i_b} / (N q_{i_b}), with G_i as in `example_traces`. Products are those of `operator`; only
    `sample` differs. So what samples by itself draws by importance: `measure_constant`, `Lissa` by
    default. Where q follows the traces condition C.1 holds with C = 1 (`certified_constant`), and
    |B| = tr(G) / λmax is enough for Corollary 1.

    Args:
        operator: G, a GaussNewtonOperator of the whole data, also spread over processes.
        probabilities: q, (N,), positive wherever G_i is not 0; they are divided by their sum.

    Attributes:
        operator: G.
        probabilities: q, fp64 on the CPU.

    A batch of a language model takes its logits as a whole, (|B|, T, V), where the operator alone would take them
    token by token.
    """

    def __init__(self, operator: GaussNewtonOperator | MeanOverRanks, probabilities: Tensor) -> None:
        super().__init__(operator)
        own_gauss_newton(operator)
        self.operator = operator
        self._importance = ExampleDraws(probabilities, self.num_examples)
        self.probabilities = self._importance.probabilities
        self._term: LinearOperator = operator

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V, or that of a batch. Cost: as `operator`, or its share of the data."""
        return self._term.matmat(vectors)

    @torch.inference_mode(False)
    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> ImportanceOperator:
        """Return the operator on `batch_size` examples drawn by q with replacement, weighted by 1 / (N q_i).

        `probabilities` take the place of q.

        A sample of a sample is a sample of the whole data again.
        """
        importance = self._draws(probabilities)
        sampled = copy.copy(self)
        sampled._term = self.operator.sample(batch_size, generator, importance.probabilities)
        return sampled

    @property
    def is_psd(self) -> bool:
        """True: weights are positive."""
        return self.operator.is_psd

    @property
    def num_examples(self) -> int:
        """N, of a sample too."""
        return cast("int", self.operator.num_examples)

    def _draws(self, probabilities: Tensor | None) -> ExampleDraws:
        return self._importance if probabilities is None else ExampleDraws(probabilities, self.num_examples)


@dataclass(frozen=True, repr=False)
class ExampleImportance(Shown):
    """Probabilities for `op.sample(batch_size, generator, probabilities)`.

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

    def summary(self) -> Summary:
        """Return how unequal the examples are, what is known of C, and the cost."""
        size, largest = len(self.probabilities), float(self.probabilities.max())
        known = (
            "measure C: the traces are estimates" if self.constant is None else f"C at most {self.constant:.3g}"
        )
        about = f"{counted(size, 'example')}; {known}"
        value = f"up to {largest * size:.3g} times uniform sampling"
        return Summary("importance of examples:", value, about, (counted(self.num_matvecs, "product"),))


def example_importance(
    operator: LinearOperator, *, floor: float = _FLOOR, generator: torch.Generator | None = None
) -> ExampleImportance:
    """Return q_i ∝ max(tr(G_i), floor · mean), for which C <= 1 + floor (`certified_constant`).

    Where parameters lie beyond linear and convolutional layers, or an example has more than 100 outputs or is a
    sequence, tr(G_i) is estimated by one random gradient of each example, and q_i ∝ the estimate, mixed with a
    tenth of the uniform distribution: no certificate, for an estimate may be small by chance.

    Args:
        operator: GaussNewtonOperator of the whole data, also spread over processes (DataParallelOperator), or a
            DenseOperator of N matrices.
        floor: no weight exceeds 1 / floor times that of uniform sampling.
        generator: of the estimates.

    Cost: (1 + C) / 5 products for C outputs; one product for estimates.
    """
    if isinstance(operator, DenseOperator) and operator.examples is not None:
        return _certified(operator.examples.diagonal(dim1=1, dim2=2).sum(1).double().cpu(), floor, 0)
    if not isinstance(operator, GaussNewtonOperator | MeanOverRanks):
        raise TypeError(
            f"importance sampling draws by tr(G_i), which {type(operator).__name__} does not tell: pass a "
            "GaussNewtonOperator without damping, and the damping as a number, or sampling='uniform'"
        )
    num_outputs = _num_outputs(own_gauss_newton(operator))
    if num_outputs is not None and num_outputs <= _MOST_OUTPUTS and has_exact_traces(operator):
        return _certified(exact_traces(operator), floor, math.ceil((1 + num_outputs) / 5))
    traces = sampled_traces(operator, generator=generator)
    return ExampleImportance(importance_probabilities(traces, uniform=_UNIFORM), traces, None, 1)


def _certified(traces: Tensor, floor: float, num_matvecs: int) -> ExampleImportance:
    q = importance_probabilities(traces, floor=floor)
    return ExampleImportance(q, traces, certified_constant(traces, q), num_matvecs)


def _num_outputs(operator: GaussNewtonOperator) -> int | None:
    """Return how many outputs an example has; None for sequences of predictions."""
    inputs, _ = next(iter(operator.sample(1, torch.Generator().manual_seed(0)).batches))
    with torch.no_grad():
        outputs = operator.function(operator.function.parameters, inputs)
    return int(outputs.shape[1]) if outputs.ndim == 2 else None
