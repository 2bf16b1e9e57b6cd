"""Importance sampling of examples: batches in which few examples with much curvature cannot do harm."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from curvlab.curvature.batch import Batch, shapes, stack, take
from curvlab.curvature.example_rows import checked_operator
from curvlab.curvature.example_traces import exact_traces, output_curvatures, sampled_traces
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.losses import OutputLoss
from curvlab.linalg import DerivedOperator


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
    if scores.ndim != 1 or not bool((scores >= 0).all()) or not bool(scores.isfinite().all()):
        raise ValueError("scores must be (N,), finite and not negative: traces of the examples' matrices")
    if floor < 0 or not 0 <= uniform <= 1:
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
    tr(G): E H̃² ⪯ tr(G) G, condition C.1 with C = 1 for any network. Uniform sampling has max_i tr(G_i) / tr(G).

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
    `sample` differs. So `Lissa`, `Lissa.auto` and `measure_constant` run on it as they are. Where q follows the
    traces condition C.1 holds with C = 1 (`certified_constant`), and |B| = tr(G) / λmax is enough for Corollary 1.

    Args:
        operator: G, a GaussNewtonOperator of the whole data.
        probabilities: q, (N,), positive wherever G_i is not 0; they are divided by their sum.

    Attributes:
        operator: G.
        probabilities: q, fp64 on the CPU.

    A batch of a language model takes its logits as a whole, (|B|, T, V), where the operator alone would take them
    token by token.
    """

    def __init__(self, operator: GaussNewtonOperator, probabilities: Tensor) -> None:
        super().__init__(operator)
        self._data = checked_operator(operator)
        probabilities = probabilities.detach().double().cpu()
        if probabilities.shape != (operator.num_examples,):
            raise ValueError(
                f"need one probability for each of {operator.num_examples} examples, got shape "
                f"{tuple(probabilities.shape)}"
            )
        if not bool((probabilities >= 0).all()) or not 0 < float(probabilities.sum()) < torch.inf:
            raise ValueError("probabilities must be finite, not negative, and not all 0")
        self.operator = operator
        self.probabilities = probabilities / probabilities.sum()
        self._cumulative = self.probabilities.cumsum(0)
        self._terms: tuple[GaussNewtonOperator, ...] = (operator,)

    @classmethod
    def by_traces(
        cls, operator: GaussNewtonOperator, *, floor: float = 0.01, generator: torch.Generator | None = None
    ) -> ImportanceOperator:
        """Return G sampled by q_i ∝ max(tr(G_i), floor · mean): C is at most 1 + floor.

        Traces are exact where linear and convolutional layers hold all parameters and outputs are (N, C).
        Elsewhere they are estimated, and q is mixed with a tenth of the uniform distribution: no certificate.
        """
        try:
            q = importance_probabilities(exact_traces(operator), floor=floor)
        except ValueError:
            q = importance_probabilities(sampled_traces(operator, generator=generator), floor=floor, uniform=0.1)
        return cls(operator, q)

    @classmethod
    def by_output_curvatures(cls, operator: GaussNewtonOperator, *, uniform: float = 0.1) -> ImportanceOperator:
        """Return G sampled by its cheap score, tr(S_i), mixed with the uniform distribution; one forward pass.

        C is at most max_i tr(G_i) / (uniform · tr(G)), by the uniform share alone; where the traces are known,
        `certified_constant` says what it is at most, which is far less.
        """
        return cls(operator, importance_probabilities(output_curvatures(operator), uniform=uniform))

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V, or that of a batch. Cost: as `operator`, or its share of the data."""
        total = self._terms[0].matmat(vectors)
        for term in self._terms[1:]:
            total = total + term.matmat(vectors)
        return total

    @torch.inference_mode(False)
    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> ImportanceOperator:
        """Return the operator on `batch_size` examples drawn by q with replacement, weighted by 1 / (N q_i).

        A sample of a sample is a sample of the whole data again.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        source = generator.device if generator is not None else torch.device("cpu")
        uniform = torch.rand(batch_size, generator=generator, dtype=torch.float64, device=source).cpu()
        # By the inverse of the distribution function: torch.multinomial refuses more than 2^24 examples.
        places = torch.searchsorted(self._cumulative, uniform * self._cumulative[-1], right=True)
        drawn = places.clamp(max=len(self._cumulative) - 1)
        num_examples = len(self.probabilities)
        weights = 1 / (num_examples * self.probabilities[drawn])
        sampled = copy.copy(self)
        divisor = batch_size / num_examples * self.operator.divisor
        sampled._terms = tuple(
            _weighted(self.operator, batch, weights[rows], divisor) for batch, rows in self._batches(drawn)
        )
        return sampled

    @property
    def is_psd(self) -> bool:
        """True: weights are positive."""
        return self.operator.is_psd

    @property
    def num_examples(self) -> int:
        """N, of a sample too."""
        return self.operator.num_examples

    def _batches(self, drawn: Tensor) -> list[tuple[Batch, Tensor]]:
        """Return the drawn examples as batches, one for each shape, with their places among the drawn."""
        if self._data.indexable:
            return [(batch, torch.arange(len(drawn))) for batch in self._data.select(drawn)]
        groups: dict[object, list[tuple[Batch, int]]] = {}
        for place in range(len(drawn)):
            ((inputs, targets),) = self._data.select(drawn[place : place + 1])
            one = take(inputs, 0), targets[0]
            groups.setdefault(shapes(*one), []).append((one, place))
        return [
            (
                (stack([one[0] for one, _ in group]), torch.stack([one[1] for one, _ in group])),
                torch.tensor([place for _, place in group]),
            )
            for group in groups.values()
        ]


class _WeightedLoss(OutputLoss):
    """Σ_n w_n l(h_n, y_n), as far as products with its output Hessian need it."""

    def __init__(self, loss: OutputLoss, weights: Tensor) -> None:
        self.reduction, self._loss, self._weights = loss.reduction, loss, weights

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return w_n S_n t_n."""
        weights = self._weights.reshape(-1, *[1] * (outputs.ndim - 1))
        return weights * self._loss.hessian_product(outputs, targets, tangents)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        self._loss.check(outputs, targets)

    def counts(self, targets: Tensor) -> Tensor:
        return self._loss.counts(targets)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._weights * self._loss.per_example(outputs, targets)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._weights.reshape(-1, *[1] * (outputs.ndim - 1)) * self._loss.gradient(outputs, targets)

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        return self._loss.sample_targets(outputs, targets, generator)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss.sampled_gradient(outputs, targets)


def _weighted(operator: GaussNewtonOperator, batch: Batch, weights: Tensor, divisor: float) -> GaussNewtonOperator:
    """Return the operator on one batch whose examples are weighted."""
    sampled = copy.copy(operator)
    sampled._batches = [batch]
    sampled._divisor = divisor
    sampled.loss = _WeightedLoss(operator.loss, weights.to(operator.device, operator.dtype))
    return sampled
