"""Losses whose predictions are weighted by their labels: `weight` of cross-entropy, `pos_weight` of binary one.

A weight is a multiplicity: a prediction of weight 2 counts as two, in the loss, in its derivatives, and in Fisher
matrices, whose labels are drawn from the unweighted model while the weight stays that of the given label.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.losses import BinaryCrossEntropy, CrossEntropy, OutputLoss


class WeightedCrossEntropy(OutputLoss):
    """-sum_c t_c log softmax(h)_c with t_c = (1 - ε) w_y [c = y] + ε w_c / C: nn.CrossEntropyLoss(weight=w).

    With τ = sum_c t_c the gradient is τ p - t, and S = τ (Diag(p) - p pᵀ): positive semi-definite. A mean divides
    by the sum of w_y over all targets, not by their number, and operators by that over the whole data: a loader's
    batches, each divided by its own sum, have other means. Multiplying all weights by a number changes nothing.
    The loss of an example alone is w_y times that without weights (PyTorch divides by w_y again).
    """

    token_wise = True

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        super().__init__(loss)
        weights = torch.as_tensor(loss.weight).detach()
        if weights.ndim != 1 or not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < torch.inf:
            raise ValueError(
                f"class weights must be (C,), finite, not negative and not all 0, got {weights.tolist()}: with a "
                "negative one the loss is not bounded below"
            )
        self.class_weights = weights
        self.ignore_index = loss.ignore_index
        self.label_smoothing = loss.label_smoothing
        self._plain = CrossEntropy(nn.CrossEntropyLoss(ignore_index=loss.ignore_index, reduction=loss.reduction))
        self._reads_drawn = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """As cross-entropy, and there is a weight for each class."""
        given = self._given(targets)
        self._plain.check(outputs, given)
        if outputs.shape[-1] != len(self.class_weights):
            raise ValueError(
                f"there are {len(self.class_weights)} class weights, but the model has {outputs.shape[-1]} outputs"
            )

    def counts(self, targets: Tensor) -> Tensor:
        """Return the summed weights of each example's targets, (N,), fp64."""
        given = self._given(targets)
        weights = self.class_weights.double().to(given.device)[self._label(given)]
        return weights.masked_fill(given == self.ignore_index, 0.0).reshape(len(given), -1).sum(1)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted sum over an example's predictions, (N,)."""
        flat, given = outputs.reshape(-1, outputs.shape[-1]), self._given(targets)
        if self._reads_drawn:
            drawn = self._plain.for_sampled_targets().per_example(flat, targets[..., 0].reshape(-1))
            losses = self._totals(flat, given.reshape(-1)).sqrt() * drawn
        elif self.label_smoothing == 0:  # by the form that keeps its digits
            losses = self._totals(flat, given.reshape(-1)) * self._plain.per_example(flat, given.reshape(-1))
        else:
            losses = functional.cross_entropy(
                flat,
                given.reshape(-1),
                weight=self._weights(flat),
                reduction="none",
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        return losses.reshape(len(given), -1).sum(1)

    def own_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of an example's weighted losses over its predictions, (N,)."""
        losses = self.per_example(outputs, targets)
        predictions = self._plain.counts(self._given(targets)).clamp(min=1).to(losses)
        return losses if self.reduction == "sum" else losses / predictions

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ softmax(h) - t; of drawn targets `sampled_gradient`."""
        if self._reads_drawn:
            return self.sampled_gradient(outputs, targets)
        classes = outputs.shape[-1]
        one_hot = functional.one_hot(self._label(targets), classes).to(outputs)
        weights = self._weights(outputs)
        goal = (1 - self.label_smoothing) * one_hot * weights + self.label_smoothing / classes * weights
        kept = (targets != self.ignore_index).unsqueeze(-1).to(outputs)
        return (goal.sum(-1, keepdim=True) * outputs.softmax(-1) - goal) * kept

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (softmax(h) - t/τ): the prediction's own gradient, counted τ times in the outer product."""
        totals = self._totals(outputs, self._given(targets)).unsqueeze(-1)
        return self.gradient(outputs, targets) / totals.sqrt().where(totals > 0, torch.ones_like(totals))

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return τ (Diag(p) - p pᵀ) t; of the labels it depends by their weight."""
        given = self._given(targets)
        product = self._plain.hessian_product(outputs, given, tangents)
        return self._totals(outputs, given).unsqueeze(-1) * product

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw classes from softmax(h); return them beside the given ones, (*targets.shape, 2)."""
        return torch.stack([self._plain.sample_targets(outputs, targets, generator), targets], -1)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (softmax(h) - e_ŷ), whose outer product is S in expectation."""
        drawn, given = targets.unbind(-1)
        return self._totals(outputs, given).sqrt().unsqueeze(-1) * self._plain.sampled_gradient(outputs, drawn)

    def for_sampled_targets(self) -> WeightedCrossEntropy:
        """Return this loss as it reads what `sample_targets` gives."""
        other = copy.copy(self)
        other._reads_drawn = True
        return other

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return r (rᵀt) prediction by prediction."""
        return self._plain.outer_product(gradients, tangents)

    def of_mean_weight_one(self, targets: list[Tensor]) -> nn.CrossEntropyLoss:
        """Return the PyTorch loss with weights of mean one over these targets: the same loss of all of them."""
        predictions = sum(float(self._plain.counts(part).sum()) for part in targets)
        mean = sum(self.count(part) for part in targets) / max(predictions, 1.0)
        return nn.CrossEntropyLoss(
            weight=self.class_weights.double() / mean,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def _given(self, targets: Tensor) -> Tensor:
        return targets[..., 1] if self._reads_drawn else targets

    def _label(self, given: Tensor) -> Tensor:
        return given.clamp(min=0, max=len(self.class_weights) - 1)

    def _weights(self, outputs: Tensor) -> Tensor:
        return self.class_weights.to(outputs)

    def _totals(self, outputs: Tensor, given: Tensor) -> Tensor:
        """Return τ of each prediction, shaped as the targets."""
        weights, smoothing = self._weights(outputs), self.label_smoothing
        totals = weights[self._label(given)]
        return totals if smoothing == 0 else (1 - smoothing) * totals + smoothing * weights.mean()


class WeightedBinaryCrossEntropy(BinaryCrossEntropy):
    """-w [a y log s(h) + (1 - y) log(1 - s(h))], s the logistic function, a = pos_weight and w = weight by output.

    With τ = w (a y + 1 - y) the gradient is τ s(h) - w a y and S = Diag(τ s (1 - s)). As PyTorch has it, a mean
    divides by the number of outputs, not by weights.
    """

    def __init__(self, loss: nn.BCEWithLogitsLoss) -> None:
        super().__init__(nn.BCEWithLogitsLoss(reduction=loss.reduction))
        for name, value in (("weight", loss.weight), ("pos_weight", loss.pos_weight)):
            if value is not None and not (bool((value >= 0).all()) and bool(value.isfinite().all())):
                raise ValueError(f"{name} must be finite and not negative, got {value.tolist()}")
        if loss.weight is not None and loss.weight.ndim > 1 and len(loss.weight) > 1:
            raise ValueError(
                f"weight of shape {tuple(loss.weight.shape)} has a row for each example of one batch: give one "
                "weight for each output, and those of examples to `weights=`"
            )
        self._weight, self._pos_weight = loss.weight, loss.pos_weight
        self._reads_drawn = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """As binary cross-entropy, with targets between 0 and 1: τ would be negative beyond."""
        given = self._given(targets)
        super().check(outputs, given)
        if not bool(((given >= 0) & (given <= 1)).all()):
            raise ValueError("targets of binary cross-entropy lie between 0 and 1")

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of single outputs, (N,)."""
        return super().counts(self._given(targets))

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted sum over an example's outputs, (N,)."""
        if self._reads_drawn:
            drawn, given = targets.unbind(-1)
            losses = functional.binary_cross_entropy_with_logits(outputs, drawn, reduction="none")
            return (self._totals(outputs, given).sqrt() * losses).reshape(len(outputs), -1).sum(1)
        losses = functional.binary_cross_entropy_with_logits(
            outputs,
            targets,
            weight=None if self._weight is None else self._weight.to(outputs),
            pos_weight=None if self._pos_weight is None else self._pos_weight.to(outputs),
            reduction="none",
        )
        return losses.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ s(h) - w a y; of drawn targets `sampled_gradient`."""
        if self._reads_drawn:
            return self.sampled_gradient(outputs, targets)
        weight, positive = self._factors(outputs)
        return self._totals(outputs, targets) * outputs.sigmoid() - weight * positive * targets

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return τ s(h) (1 - s(h)) t."""
        given = self._given(targets)
        return self._totals(outputs, given) * super().hessian_product(outputs, given, tangents)

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw y ~ Bernoulli(s(h)); return them beside the given ones, (*targets.shape, 2)."""
        return torch.stack([super().sample_targets(outputs, targets, generator), targets], -1)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (s(h) - ŷ), whose outer product is S in expectation."""
        drawn, given = targets.unbind(-1)
        return self._totals(outputs, given).sqrt() * (outputs.sigmoid() - drawn)

    def for_sampled_targets(self) -> WeightedBinaryCrossEntropy:
        """Return this loss as it reads what `sample_targets` gives."""
        other = copy.copy(self)
        other._reads_drawn = True
        return other

    def _given(self, targets: Tensor) -> Tensor:
        return targets[..., 1] if self._reads_drawn else targets

    def _factors(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(outputs[:1])
        weight, positive = (one if w is None else w.to(outputs) for w in (self._weight, self._pos_weight))
        return weight, positive

    def _totals(self, outputs: Tensor, given: Tensor) -> Tensor:
        weight, positive = self._factors(outputs)
        return weight * (positive * given + 1 - given)
