"""A loss whose examples are weighted, for batches that were not drawn uniformly."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.problem.losses import OutputLoss


class WeightedLoss(OutputLoss):
    """Σ_n w_n l(h_n, y_n) over the examples of one batch; `count` is that of the loss without weights.

    Args:
        loss: l.
        weights: w, (N,), positive.
    """

    def __init__(self, loss: OutputLoss, weights: Tensor) -> None:
        self.reduction, self.loss, self._weights = loss.reduction, loss, weights
        self.twice_backward = loss.twice_backward

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return w_n S_n t_n."""
        return self._shaped(outputs) * self.loss.hessian_product(outputs, targets, tangents)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless targets fit the outputs."""
        self.loss.check(outputs, targets)

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of predictions of each example, without weights."""
        return self.loss.counts(targets)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return w_n l_n, (N,)."""
        return self._weights * self.loss.per_example(outputs, targets)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return w_n ∇l_n."""
        return self._shaped(outputs) * self.loss.gradient(outputs, targets)

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets from the model's own distribution."""
        return self.loss.sample_targets(outputs, targets, generator)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return w_n times the derivative of -log p for drawn targets."""
        return self._shaped(outputs) * self.loss.sampled_gradient(outputs, targets)

    def for_sampled_targets(self) -> WeightedLoss:
        """Return the weighted loss as it reads drawn targets."""
        return WeightedLoss(self.loss.for_sampled_targets(), self._weights)

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return w r rᵀt: gradients are w r, so that their own outer product has a w too many."""
        return self.loss.outer_product(gradients, tangents) / self._shaped(gradients)

    @property
    def is_psd(self) -> bool | None:
        """As without weights, which are positive."""
        return self.loss.is_psd

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return w_n times that of the loss without weights."""
        return self._shaped(outputs) * self.loss.example_gradient(outputs, targets)

    def _shaped(self, outputs: Tensor) -> Tensor:
        return self._weights.reshape(-1, *[1] * (outputs.ndim - 1))


def unweighted(loss: OutputLoss) -> OutputLoss:
    """Return the loss without the weights of a batch."""
    return loss.loss if isinstance(loss, WeightedLoss) else loss
