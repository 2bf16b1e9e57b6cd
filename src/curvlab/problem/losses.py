"""Losses as functions of the model's outputs: sums, gradients and closed-form Hessians.

Everything here is a sum over predictions, without the loss's own averaging: the operators divide once, by the
count over the whole data, so that batches of any sizes give the same matrix.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.two_readings import refuse_two_readings

# Marks ignored targets among drawn ones: the loss's own ignore_index may be a class, and then it is drawn too.
_IGNORED_DRAW = -100


class OutputLoss(ABC):
    """sum_n l(h_n, y_n) with its derivatives in h.

    Attributes:
        reduction: "mean" or "sum", as the PyTorch loss had it.
        token_wise: whether classes come last, and every place before them is a prediction of its own.
        by_vmap: whether it can be mapped over examples and parameters.
        twice_backward: whether forward mode may not exist for its derivatives, which autograd takes.
    """

    token_wise = False
    by_vmap = True
    twice_backward = False

    def __init__(self, loss: nn.Module) -> None:
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction='{reduction}' has no curvature matrix: use 'mean' or 'sum'")
        self.reduction = reduction

    @property
    def is_psd(self) -> bool | None:
        """Whether S is positive semi-definite for all outputs; None where that is not known."""
        return True

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless targets fit the outputs."""

    @abstractmethod
    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of predictions of each example, (N,): what a mean over it divides by."""

    def count(self, targets: Tensor) -> float:
        """Return by how much a mean divides the sum over these targets."""
        return float(self.counts(targets).sum())

    @abstractmethod
    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of each example, (N,)."""

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all examples, ()."""
        return self.per_example(outputs, targets).sum()

    def own_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what the PyTorch loss gives for each example alone, (N,): a mean over its own predictions."""
        losses = self.per_example(outputs, targets)
        return losses if self.reduction == "sum" else losses / self.counts(targets).clamp(min=1).to(losses)

    def bregman_divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        """Return l(h) - l(h') - (h - h')ᵀ∇l(h') summed over an example's predictions, (N,).

        The D of Klochkov & Liu (2024), Eq. 5. For cross-entropy it does not depend on the labels. It cancels to
        rounding where h - h' is below 1e-8: optimise by its gradient, ∇l(h) - ∇l(h').
        """
        linear = ((outputs - reference) * self.gradient(reference, targets)).flatten(1).sum(1)
        return self.per_example(outputs, targets) - self.per_example(reference, targets) - linear

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of the sum by the outputs, shaped like them."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return S t for each prediction. Cost: linear in the outputs.

        t is shaped as the outputs, or (K, *outputs.shape) for K tangents at once.
        """

    @abstractmethod
    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets from the model's own distribution p ∝ exp(-l).

        Pass them to `sampled_gradient`, or to `count` and `check` of `for_sampled_targets()`: drawn targets mark
        ignored predictions in their own way.
        """

    @abstractmethod
    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of -log p by the outputs for drawn targets; zero where they are ignored."""

    def for_sampled_targets(self) -> OutputLoss:
        """Return this loss as it reads targets drawn by `sample_targets`."""
        return self

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return r (rᵀt) example by example, with all outputs of an example in one vector; t as above."""
        products = gradients * tangents
        axes = tuple(range(1 - gradients.ndim, 0))  # all but the examples'; none of them would mean all in `sum`
        return gradients * (products.sum(axes, keepdim=True) if axes else products)

    def example_scale(self, outputs: Tensor) -> float:
        """Return c such that c² r rᵀ, divided by `count`, is the outer product of an example's gradient."""
        return 1.0

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient, scaled by `example_scale`: what the empirical Fisher matrix is made of."""
        return self.example_scale(outputs) * self.gradient(outputs, targets)


class CrossEntropy(OutputLoss):
    """-log softmax(h)_y for logits (N, C), or (N, T, V) with one label for each position: classes come last."""

    token_wise = True

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        super().__init__(loss)
        self.ignore_index = loss.ignore_index
        self.label_smoothing = loss.label_smoothing

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets are class indices with the outputs' shape less its last axis."""
        if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
            raise ValueError(
                f"cross-entropy needs integer class indices of shape {tuple(outputs.shape[:-1])} for outputs "
                f"of shape {tuple(outputs.shape)} (classes last), got {targets.dtype} {tuple(targets.shape)}"
            )
        refuse_two_readings(outputs, targets)
        kept = targets[targets != self.ignore_index]
        if len(kept) and (kept.min() < 0 or kept.max() >= outputs.shape[-1]):
            raise ValueError(
                f"class indices run from {int(kept.min())} to {int(kept.max())}, but the model has "
                f"{outputs.shape[-1]} outputs"
            )

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not ignored, (N,)."""
        return (targets != self.ignore_index).reshape(targets.shape[0], -1).sum(1)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over an example's predictions, (N,).

        Without smoothing as softplus(log sum_{k≠y} exp h_k - h_y), which keeps its relative accuracy, and that of
        its derivatives, where p_y rounds to 1: -log softmax(h)_y and p_y - 1 lose all digits there.
        """
        if self.label_smoothing == 0 and outputs.shape[-1] > 1:
            label = targets.clamp(min=0, max=outputs.shape[-1] - 1).unsqueeze(-1)
            others = outputs.scatter(-1, label, -torch.inf).logsumexp(-1)
            losses = functional.softplus(others - outputs.gather(-1, label).squeeze(-1))
            losses = losses.masked_fill(targets == self.ignore_index, 0.0)
        else:
            losses = functional.cross_entropy(
                outputs.reshape(-1, outputs.shape[-1]),
                targets.reshape(-1),
                reduction="none",
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        return losses.reshape(targets.shape[0], -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return softmax(h) - y, with y smoothed as the loss says."""
        classes = outputs.shape[-1]
        smoothed = (1 - self.label_smoothing) * self._one_hot(outputs, targets) + self.label_smoothing / classes
        return (outputs.softmax(-1) - smoothed) * self._kept(outputs, targets)

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return (Diag(p) - p pᵀ) t; it does not depend on the labels, except where they are ignored."""
        probabilities = outputs.softmax(-1)
        weighted = probabilities * tangents
        product = weighted - probabilities * weighted.sum(-1, keepdim=True)
        return product * self._kept(outputs, targets)

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a class for each prediction from softmax(h), except where the given target is ignored."""
        probabilities = outputs.softmax(-1).reshape(-1, outputs.shape[-1]).to(generator.device)
        drawn = torch.multinomial(probabilities, 1, generator=generator).reshape(targets.shape)
        return drawn.to(targets).masked_fill(targets == self.ignore_index, _IGNORED_DRAW)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return softmax(h) - e_y: smoothing belongs to given labels, not to drawn ones."""
        kept = (targets != _IGNORED_DRAW).unsqueeze(-1).to(outputs.dtype)
        return (outputs.softmax(-1) - self._one_hot(outputs, targets)) * kept

    def for_sampled_targets(self) -> CrossEntropy:
        """Return this loss with the mark of ignored draws as its ignore_index, and unsmoothed."""
        other = copy.copy(self)
        other.ignore_index = _IGNORED_DRAW
        other.label_smoothing = 0.0  # belongs to given labels, not to drawn ones
        return other

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return r (rᵀt) prediction by prediction: every token is an example of its own."""
        return gradients * (gradients * tangents).sum(-1, keepdim=True)

    def _one_hot(self, outputs: Tensor, targets: Tensor) -> Tensor:
        classes = targets.clamp(min=0, max=outputs.shape[-1] - 1)
        return functional.one_hot(classes, outputs.shape[-1]).to(outputs.dtype)

    def _kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets != self.ignore_index).unsqueeze(-1).to(outputs.dtype)


class _Elementwise(OutputLoss):
    """A sum over all outputs of an example; a mean divides by their number too, as PyTorch does."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets have the outputs' shape, as PyTorch would broadcast silently, and are finite."""
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ValueError(
                f"targets must be floating point of the outputs' shape {tuple(outputs.shape)}, got "
                f"{targets.dtype} {tuple(targets.shape)}; a missing axis is added by targets.unsqueeze(-1)"
            )
        if not torch.isfinite(targets).all():
            rows = (~torch.isfinite(targets)).flatten(1).any(1) if targets.ndim > 1 else ~torch.isfinite(targets)
            raise ValueError(
                f"targets contain NaN or infinity (rows {rows.nonzero().flatten()[:5].tolist()} of a batch of "
                f"{len(targets)}): remove those examples, or fill in their targets."
            )

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of single outputs, (N,)."""
        return torch.full((targets.shape[0],), targets[0].numel(), device=targets.device)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the ordinary gradient: the loss is -log p up to a constant."""
        return self.gradient(outputs, targets)

    def example_scale(self, outputs: Tensor) -> float:
        """Return 1/sqrt(C) for means over C outputs: an example's loss is divided by C, its square by C²."""
        return (outputs[0].numel() ** -0.5) if self.reduction == "mean" else 1.0


class SquaredError(_Elementwise):
    """sum (h - y)²: -log of a Gaussian of variance 1/2. S = 2 I (2/C I after a mean over C outputs)."""

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of squares over an example's outputs, (N,)."""
        return (outputs - targets).square().reshape(outputs.shape[0], -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 2 (h - y)."""
        return 2 * (outputs - targets)

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return 2 t."""
        return 2 * tangents

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw y ~ N(h, 1/2)."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=generator.device)
        return outputs + 0.5**0.5 * noise.to(outputs.device)


class BinaryCrossEntropy(_Elementwise):
    """-y log s(h) - (1-y) log(1-s(h)) with s the logistic function, for any number of outputs."""

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over an example's outputs, (N,)."""
        losses = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return losses.reshape(outputs.shape[0], -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return s(h) - y."""
        return outputs.sigmoid() - targets

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return s(h) (1 - s(h)) t."""
        probabilities = outputs.sigmoid()
        return probabilities * (1 - probabilities) * tangents

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw y ~ Bernoulli(s(h))."""
        probabilities = outputs.sigmoid().to(generator.device)
        return torch.bernoulli(probabilities, generator=generator).to(outputs)
