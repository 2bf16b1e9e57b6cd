"""Curvature matrices of weighted examples: 1/n Σ_i w_i A_i, for weights of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.curvature.data_operator import DataOperator
from curvlab.linalg import DerivedOperator
from curvlab.problem.batches import whole_data
from curvlab.problem.example_weights import checked_weights


class WeightedOperator(DerivedOperator):
    """1/n Σ_i w_i A_i, A_i and n those of `operator` = 1/n Σ_i A_i: of weight 2, an example counts twice.

    As everywhere, weighted sums are divided by n, never by the sum of the weights: a weight of 0 takes an example
    away and leaves the others as they were. It has no random batches; `operator.sample(weights=...)` is another
    thing, it draws by weights and stays unbiased for the matrix without them.

    Args:
        operator: a GaussNewtonOperator, HessianOperator or FisherOperator of the whole data.
        weights: w, (N,), not negative, in the order of the data.
        batch_size: examples at a time.
        divisor: n, where the sum is part of a mean over more examples; None: the operator's.

    Cost: as `operator`; logits of language models are taken as a whole.
    """

    def __init__(
        self, operator: DataOperator, weights: Tensor, *, batch_size: int = 512, divisor: float | None = None
    ) -> None:
        super().__init__(operator)
        whole_data(operator.batches, "weights")
        self.operator, self.weights = operator, checked_weights(weights, operator.num_examples).cpu()
        self._divisor = operator.divisor if divisor is None else divisor
        kept = self.weights.to(operator.dtype).nonzero().flatten()  # what rounds to 0 there is 0 as well
        self._kept = kept.split(batch_size) if len(kept) else ()

    @property
    def is_psd(self) -> bool:
        """As without weights, which are not negative."""
        return self.operator.is_psd

    @torch.inference_mode(False)
    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P, K) -> (P, K)."""
        total = torch.zeros_like(vectors)
        for places in self._kept:
            parts = self.operator.weighted_parts(places, self.weights[places], divisor=self._divisor)
            for part in parts:
                total = total + part.matmat(vectors)
        return total
