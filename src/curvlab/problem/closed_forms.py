"""Cross-entropy, squared error and binary cross-entropy: their derivatives by the outputs in closed form.

Weights of labels (`weight` of cross-entropy, `weight` and `pos_weight` of binary cross-entropy) are
multiplicities: a prediction of weight 2 counts as two, in the loss, in its derivatives, and in Fisher matrices,
whose labels are drawn from the unweighted model while the weight stays that of the given label.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.losses import OutputLoss, random_signs

# Marks ignored targets among drawn ones: the loss's own ignore_index may be a class, and then it is drawn too.
_IGNORED_DRAW = -100


class _ClosedForm(OutputLoss):
    """A sum of examples' own losses, whose targets may hold drawn labels beside the given ones."""

    _reads_pairs = False  # whether targets are (drawn, given)

    def total(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum over all examples, (), each times its weight, (N,)."""
        losses = self.per_example(outputs, targets)
        return losses.sum() if weights is None else (weights * losses).sum()

    def _drawn_and_given(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        drawn, given = targets.unbind(-1) if self._reads_pairs else (targets, targets)
        return drawn, given

    def _reading_pairs(self) -> Self:
        other = copy.copy(self)
        other._reads_pairs = True
        return other


class CrossEntropy(_ClosedForm):
    """-sum_c t_c log softmax(h)_c with t_c = (1 - ε) w_y [c = y] + ε w_c / C, w class weights and ε the smoothing.

    Logits are (N, C), or (N, T, V) with one label for each position: classes come last. With τ = sum_c t_c, 1
    without weights, the gradient is τ p - t, and S = τ (Diag(p) - p pᵀ): positive semi-definite. A weighted mean
    divides by the sum of w_y over all targets, not by their number, and operators by that over the whole data: a
    loader's batches, each divided by its own sum, have other means. Multiplying all weights by a number changes
    nothing. The loss of an example alone is w_y times that without weights (PyTorch divides by w_y again).
    """

    token_wise = True

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        super().__init__(loss)
        self.class_weights = None if loss.weight is None else loss.weight.detach()
        self.ignore_index = loss.ignore_index
        self.label_smoothing = loss.label_smoothing
        weights = self.class_weights
        if weights is not None and (
            weights.ndim != 1 or not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < torch.inf
        ):
            raise ValueError(
                f"class weights must be (C,), finite, not negative and not all 0, got {weights.tolist()}: with a "
                "negative one the loss is not bounded below"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets are class indices with the outputs' shape less its last axis; each class has a weight."""
        _, targets = self._drawn_and_given(targets)
        classes = outputs.shape[-1]
        if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
            raise ValueError(
                f"cross-entropy needs integer class indices of shape {tuple(outputs.shape[:-1])} for outputs "
                f"of shape {tuple(outputs.shape)} (classes last), got {targets.dtype} {tuple(targets.shape)}. For "
                "probabilities, and for classes on another axis, pass a function, lambda outputs, targets: "
                "torch.nn.functional.cross_entropy(outputs, targets)"
            )
        if outputs.ndim > 2:
            refuse_ambiguous_classes(outputs, targets)
        lowest, highest = _range(targets)
        if lowest < 0 or highest >= classes:  # the ignored index may be why
            lowest, highest = _range(targets[targets != self.ignore_index])
        if lowest < 0 or highest >= classes:
            raise ValueError(f"class indices run from {lowest} to {highest}, but the model has {classes} outputs")
        if self.class_weights is not None and classes != len(self.class_weights):
            raise ValueError(
                f"there are {len(self.class_weights)} class weights, but the model has {classes} outputs"
            )

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not ignored, (N,), or their summed weights, fp64."""
        _, given = self._drawn_and_given(targets)
        counted = given != self.ignore_index
        if self.class_weights is not None:
            if given.is_floating_point():
                raise ValueError("class weights are for class indices, got targets that are probabilities")
            weights = self.class_weights.double().to(given.device)
            counted = weights[_class(given, len(weights))].masked_fill(~counted, 0.0)
        return counted.reshape(len(given), -1).sum(1)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over an example's predictions, (N,).

        Without smoothing as softplus(log sum_{k≠y} exp h_k - h_y), which keeps its relative accuracy, and that of
        its derivatives, where p_y rounds to 1: -log softmax(h)_y and p_y - 1 lose all digits there.
        """
        drawn, given = self._drawn_and_given(targets)
        if (self.label_smoothing == 0 or self._reads_pairs) and outputs.shape[-1] > 1:
            label = _class(drawn, outputs.shape[-1]).unsqueeze(-1)
            others = outputs.scatter(-1, label, -torch.inf).logsumexp(-1)
            losses = functional.softplus(others - outputs.gather(-1, label).squeeze(-1))
            losses = losses.masked_fill(given == self.ignore_index, 0.0)
            if self.class_weights is not None:
                totals = self._totals(outputs, given)
                losses = (totals.sqrt() if self._reads_pairs else totals) * losses
        else:
            losses = functional.cross_entropy(
                outputs.reshape(-1, outputs.shape[-1]),
                given.reshape(-1),
                weight=None if self.class_weights is None else self.class_weights.to(outputs),
                reduction="none",
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        return losses.reshape(len(given), -1).sum(1)

    def own_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of an example's losses over its predictions, (N,), by their number also with weights."""
        losses, (_, given) = self.per_example(outputs, targets), self._drawn_and_given(targets)
        predictions = (given != self.ignore_index).reshape(len(given), -1).sum(1).clamp(min=1).to(losses)
        return losses if self.reduction == "sum" else losses / predictions

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ softmax(h) - t; of drawn targets `sampled_gradient`."""
        if self._reads_pairs:
            return self.sampled_gradient(outputs, targets)
        classes = outputs.shape[-1]
        goal = (1 - self.label_smoothing) * _one_hot(outputs, targets) + self.label_smoothing / classes
        p = outputs.softmax(-1)
        if self.class_weights is not None:
            goal = goal * self.class_weights.to(outputs)
            p = p * goal.sum(-1, keepdim=True)
        return (p - goal) * (targets != self.ignore_index).unsqueeze(-1).to(outputs)

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return τ (Diag(p) - p pᵀ) t; of the labels it depends by their weight, and where they are ignored."""
        p = outputs.softmax(-1)
        weighted = p * tangents
        product = weighted - p * weighted.sum(-1, keepdim=True)
        return product * self._multiplicities(outputs, targets)

    def hessian_traces(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ (1 - sum_c p_c²), summed over an example's predictions, (N,)."""
        p = outputs.softmax(-1)
        # As sum p (1 - p), which is never negative: 1 - sum p² may be, to rounding.
        return (p * (1 - p) * self._multiplicities(outputs, targets)).flatten(1).sum(1)

    def hessian_factors(self, outputs: Tensor, targets: Tensor, *, limit: int | None = None) -> Tensor:
        """Return sqrt(τ p_c) (e_c - p) for each class c; with a limit for those of the largest p_c."""
        if outputs.ndim != 2:
            raise ValueError(
                f"outputs of shape {tuple(outputs.shape)} are a row for each class of each token: draw labels "
                "instead (sampled_traces), and precondition by products (Nystrom)"
            )
        p = outputs.softmax(-1)
        chosen = _largest(p, limit)  # (N, R)
        one_hot = functional.one_hot(chosen, p.shape[-1]).to(p)
        columns = p.gather(1, chosen).sqrt()[:, :, None] * (one_hot - p[:, None])
        return (columns * self._multiplicities(outputs, targets).sqrt()[:, None]).transpose(0, 1)

    def random_factor(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Return random r with E r = 0 and E r rᵀ = S.

        Labels drawn from the model, r = e_y - p, would do; but where p_c is near 1, r is nearly 0 for almost every
        draw and the rest is left to rare ones. So the class c is drawn with probability π_c = p_c ‖e_c - p‖² /
        tr(S), and r = ± sqrt(tr(S)) (e_c - p) / ‖e_c - p‖ always has the length sqrt(tr(S)): sum_c π_c r rᵀ =
        sum_c p_c (e_c - p) (e_c - p)ᵀ = S.
        """
        p = outputs.softmax(-1).flatten(0, -2)
        squares = p.square()
        lengths = (1 - p).square() + squares.sum(-1, keepdim=True) - squares  # ‖e_c - p‖²
        shares = (p * lengths).clamp(min=0)
        total = shares.sum(-1, keepdim=True)  # tr(S)
        choice = torch.where(total > 0, shares, p).to(generator.device)
        drawn = torch.multinomial(choice, 1, generator=generator).to(p.device)
        signs = random_signs(drawn.shape, generator).to(p)
        direction = torch.zeros_like(p).scatter(-1, drawn, 1.0) - p
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        found = (total.sqrt() * signs * direction).reshape(outputs.shape)
        return found * self._multiplicities(outputs, targets).sqrt()

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a class for each prediction from softmax(h), except where the given target is ignored."""
        probabilities = outputs.softmax(-1).reshape(-1, outputs.shape[-1]).to(generator.device)
        drawn = torch.multinomial(probabilities, 1, generator=generator).reshape(targets.shape).to(targets)
        drawn = drawn.masked_fill(targets == self.ignore_index, _IGNORED_DRAW)
        return drawn if self.class_weights is None else torch.stack([drawn, targets], -1)

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (softmax(h) - e_y), whose outer product is S in expectation: smoothing is of given labels."""
        drawn, given = self._drawn_and_given(targets)
        kept = (drawn != _IGNORED_DRAW).unsqueeze(-1).to(outputs)
        gradient = (outputs.softmax(-1) - _one_hot(outputs, drawn)) * kept
        return (
            gradient if self.class_weights is None else self._totals(outputs, given).sqrt()[..., None] * gradient
        )

    def for_sampled_targets(self) -> CrossEntropy:
        """Return this loss as it reads drawn targets: unsmoothed, and with their mark of ignored ones."""
        if self.class_weights is not None:
            return self._reading_pairs()
        other = copy.copy(self)
        other.ignore_index, other.label_smoothing = _IGNORED_DRAW, 0.0
        return other

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return r (rᵀt) prediction by prediction: every token is an example of its own."""
        return gradients * (gradients * tangents).sum(-1, keepdim=True)

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (softmax(h) - t/τ): the prediction's own gradient, counted τ times in the outer product."""
        gradient = self.gradient(outputs, targets)
        if self.class_weights is None:
            return gradient
        totals = self._totals(outputs, self._drawn_and_given(targets)[1]).unsqueeze(-1)
        return gradient / totals.sqrt().where(totals > 0, torch.ones_like(totals))

    def normalised(self, targets: Iterable[Tensor]) -> CrossEntropy:
        """Return this loss with class weights of mean one; in a sum an example's loss is its term already."""
        if self.class_weights is None or self.reduction == "sum":
            return self
        given = list(targets)
        predictions = sum(float((part != self.ignore_index).sum()) for part in given)
        other = copy.copy(self)
        mean = sum(self.count(part) for part in given) / max(predictions, 1.0)
        other.class_weights = self.class_weights.double() / mean
        return other

    def _multiplicities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ of each prediction, 0 where it is ignored, with an axis for the classes."""
        _, given = self._drawn_and_given(targets)
        kept = (given != self.ignore_index).unsqueeze(-1).to(outputs)
        return kept if self.class_weights is None else kept * self._totals(outputs, given).unsqueeze(-1)

    def _totals(self, outputs: Tensor, given: Tensor) -> Tensor:
        """Return τ of each prediction, shaped as the targets, where classes have weights."""
        weights = torch.as_tensor(self.class_weights).to(outputs)
        smoothing = self.label_smoothing
        return (1 - smoothing) * weights[_class(given, len(weights))] + smoothing * weights.mean()


class _Elementwise(_ClosedForm):
    """A sum over all outputs of an example, S diagonal; a mean divides by their number too, as PyTorch does."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets have the outputs' shape, as PyTorch would broadcast silently, and are finite."""
        _, targets = self._drawn_and_given(targets)
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ValueError(
                f"targets must be floating point of the outputs' shape {tuple(outputs.shape)}, got "
                f"{targets.dtype} {tuple(targets.shape)}; a missing axis is added by targets.unsqueeze(-1)"
            )
        if not torch.isfinite(targets).all():
            rows = (~torch.isfinite(targets)).reshape(len(targets), -1).any(1).nonzero().flatten()
            raise ValueError(
                f"targets contain NaN or infinity (rows {rows[:5].tolist()} of a batch of {len(targets)}): remove "
                "those examples, or fill in their targets."
            )

    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of single outputs, (N,)."""
        _, given = self._drawn_and_given(targets)
        return torch.full((len(given),), given[0].numel(), device=given.device)

    def hessian_traces(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of S's diagonal, (N,)."""
        return self._diagonal(outputs, targets).flatten(1).sum(1)

    def hessian_factors(self, outputs: Tensor, targets: Tensor, *, limit: int | None = None) -> Tensor:
        """Return sqrt(S_cc) e_c for each output c; with a limit for the largest."""
        root = self._diagonal(outputs, targets).sqrt().flatten(1)
        chosen = _largest(root, limit)
        columns = functional.one_hot(chosen, root.shape[1]).to(root) * root[:, None]
        return columns.transpose(0, 1).reshape(chosen.shape[1], *outputs.shape)

    def random_factor(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Return ± sqrt(S) with a sign for each output."""
        return self._diagonal(outputs, targets).sqrt() * random_signs(outputs.shape, generator).to(outputs)

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ∇l / sqrt(C) for means over C outputs: an example's loss is divided by C, its square by C²."""
        gradient = self.gradient(outputs, targets)
        return gradient * outputs[0].numel() ** -0.5 if self.reduction == "mean" else gradient

    def _diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.hessian_product(outputs, targets, torch.ones_like(outputs))


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
    """-w [a y log s(h) + (1 - y) log(1 - s(h))], s the logistic function, a = pos_weight and w = weight by output.

    With τ = w (a y + 1 - y), 1 without weights, the gradient is τ s(h) - w a y and S = Diag(τ s (1 - s)). As
    PyTorch has it, a mean divides by the number of outputs, not by weights.
    """

    def __init__(self, loss: nn.BCEWithLogitsLoss) -> None:
        super().__init__(loss)
        for name, value in (("weight", loss.weight), ("pos_weight", loss.pos_weight)):
            if value is not None and not (bool((value >= 0).all()) and bool(value.isfinite().all())):
                raise ValueError(f"{name} must be finite and not negative, got {value.tolist()}")
        if loss.weight is not None and loss.weight.ndim > 1 and len(loss.weight) > 1:
            raise ValueError(
                f"weight of shape {tuple(loss.weight.shape)} has a row for each example of one batch: give one "
                "weight for each output, and those of examples to `weights=`"
            )
        self._weight, self._pos_weight = loss.weight, loss.pos_weight
        self._is_weighted = loss.weight is not None or loss.pos_weight is not None

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """As all; and targets lie between 0 and 1: labels of -1 and 1 would have a loss without a lower end."""
        super().check(outputs, targets)
        _, given = self._drawn_and_given(targets)
        if not bool(((given >= 0) & (given <= 1)).all()):
            raise ValueError(
                f"targets of binary cross-entropy lie between 0 and 1, got {float(given.min()):g} to "
                f"{float(given.max()):g}"
            )

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted sum over an example's outputs, (N,)."""
        drawn, given = self._drawn_and_given(targets)
        if self._reads_pairs:
            losses = functional.binary_cross_entropy_with_logits(outputs, drawn, reduction="none")
            losses = self._totals(outputs, given).sqrt() * losses
        else:
            weight, positive = (None if w is None else w.to(outputs) for w in (self._weight, self._pos_weight))
            losses = functional.binary_cross_entropy_with_logits(
                outputs, given, weight=weight, pos_weight=positive, reduction="none"
            )
        return losses.reshape(outputs.shape[0], -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return τ s(h) - w a y; of drawn targets `sampled_gradient`."""
        if self._reads_pairs:
            return self.sampled_gradient(outputs, targets)
        if not self._is_weighted:
            return outputs.sigmoid() - targets
        weight, positive = self._factors(outputs)
        return self._totals(outputs, targets) * outputs.sigmoid() - weight * positive * targets

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return τ s(h) (1 - s(h)) t."""
        s = outputs.sigmoid()
        product = s * (1 - s) * tangents
        _, given = self._drawn_and_given(targets)
        return self._totals(outputs, given) * product if self._is_weighted else product

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw y ~ Bernoulli(s(h))."""
        drawn = torch.bernoulli(outputs.sigmoid().to(generator.device), generator=generator).to(outputs)
        return torch.stack([drawn, targets], -1) if self._is_weighted else drawn

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return √τ (s(h) - y), whose outer product is S in expectation."""
        drawn, given = self._drawn_and_given(targets)
        gradient = outputs.sigmoid() - drawn
        return self._totals(outputs, given).sqrt() * gradient if self._is_weighted else gradient

    def for_sampled_targets(self) -> BinaryCrossEntropy:
        """Return this loss as it reads drawn targets."""
        return self._reading_pairs() if self._is_weighted else self

    def _factors(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(outputs[:1])
        weight, positive = (one if w is None else w.to(outputs) for w in (self._weight, self._pos_weight))
        return weight, positive

    def _totals(self, outputs: Tensor, given: Tensor) -> Tensor:
        weight, positive = self._factors(outputs)
        return weight * (positive * given + 1 - given)


# ------------------------------------------------------------------------------------------ shapes
def has_ambiguous_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether classes could stand last, (N, T, V), as well as second, (N, C, H), as PyTorch has it.

    Both give a number for (N, K, K) and targets (N, K), and it is not the same one.
    """
    last, second = outputs.shape[:-1], (outputs.shape[0], *outputs.shape[2:])
    return outputs.ndim > 2 and targets.shape == last and targets.shape == second


def refuse_ambiguous_classes(outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError where class indices fit the outputs in two ways."""
    if has_ambiguous_classes(outputs, targets):
        raise ValueError(
            f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)} can be read in two ways: "
            "with classes last, as a language model's logits, or second, as nn.CrossEntropyLoss reads them. Say "
            "which by a loss of your own: lambda outputs, targets: torch.nn.functional.cross_entropy("
            "outputs.flatten(0, -2), targets.flatten()) for classes last, without flatten for classes second; or "
            "pad or cut sequences to another length than the number of classes."
        )


def _range(targets: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest index; 0 twice where there is none."""
    return tuple(map(int, targets.aminmax())) if targets.numel() else (0, 0)  # type: ignore[return-value]


def _class(targets: Tensor, num_classes: int) -> Tensor:
    """Return targets as indices, also where an ignored one is none."""
    return targets.clamp(min=0, max=num_classes - 1)


def _one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    classes = outputs.shape[-1]
    # F.one_hot asks for the smallest value, which no record of the operations can (`Records`).
    which = torch.arange(classes, device=outputs.device)
    return (_class(targets, classes).unsqueeze(-1) == which).to(outputs.dtype)


def _largest(values: Tensor, limit: int | None) -> Tensor:
    """Return the places of the `limit` largest of each row, all in order without a limit, (N, R)."""
    if limit is not None and limit < values.shape[1]:
        return values.topk(limit, dim=1).indices
    return torch.arange(values.shape[1], device=values.device).expand(values.shape)
