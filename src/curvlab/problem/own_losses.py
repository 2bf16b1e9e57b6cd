"""Any loss as one of the family: closed forms where they are known, a user's own functions by autograd."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn import functional

from curvlab.problem.batch import Batch, take
from curvlab.problem.closed_forms import BinaryCrossEntropy, CrossEntropy, SquaredError
from curvlab.problem.losses import OutputLoss, at_least_single
from curvlab.problem.model_function import ModelFunction, check_finite

EXAMPLES_TRIED = 16

# (outputs, targets) -> (), the mean over the examples of a batch.
LossFunction = Callable[[Tensor, Tensor], Tensor]
# (outputs, given targets, generator) -> targets drawn from the model's own distribution, like the given ones.
TargetSampler = Callable[[Tensor, Tensor, torch.Generator], Tensor]
Loss: TypeAlias = nn.Module | LossFunction | OutputLoss

_CLOSED_FORMS: dict[type[nn.Module], Callable[[Any], OutputLoss]] = {
    nn.CrossEntropyLoss: CrossEntropy,
    nn.MSELoss: SquaredError,
    nn.BCEWithLogitsLoss: BinaryCrossEntropy,
}
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.mse_loss: nn.MSELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


def output_loss(loss: Loss) -> OutputLoss:
    """Return the derivatives of a loss by the outputs.

    Closed forms for nn.CrossEntropyLoss (class weights and smoothing included), nn.MSELoss and
    nn.BCEWithLogitsLoss (with pos_weight), and for their functions in torch.nn.functional; autograd for every
    other function of (outputs, targets) that is a mean over examples, see `FunctionLoss`. Softmax and sigmoid
    belong to the loss, not to the model.
    """
    if isinstance(loss, OutputLoss):
        return loss
    if loss in _FUNCTIONS:
        loss = _FUNCTIONS[loss]()
    for kind, closed_form in _CLOSED_FORMS.items():
        # A forward of its own has derivatives of its own.
        if isinstance(loss, kind) and type(loss).forward is kind.forward and "forward" not in vars(loss):
            return closed_form(loss)
    return FunctionLoss(loss)


class FunctionLoss(OutputLoss):
    """mean_n l(h_n, y_n), known only as a function that autograd can differentiate twice by the outputs.

    S = ∇²l by a second reverse pass, block by block: examples do not meet in a mean. What the function must be is
    tried on every batch (`check`): a sum over examples is refused, and so is a loss in which examples meet.

    Args:
        loss: (outputs, targets) -> (), a mean over examples: nn.HuberLoss(), a focal loss, ...
        is_psd: whether S is positive semi-definite, that is, whether l is convex in the outputs. None: not known;
            `GaussNewtonOperator.is_psd` then looks at the eigenvalues of S at all outputs of its data.
        sample_targets: (outputs, targets, generator) -> targets drawn from the distribution p of which l is
            -log p, up to a constant. Without it no Fisher matrix but the empirical one is defined: a function does
            not say which distribution it comes from.

    Cost of a product with S: two reverse passes of the function, nothing of the model; two calls for the check.
    """

    twice_backward = True

    def __init__(
        self, loss: LossFunction, *, is_psd: bool | None = None, sample_targets: TargetSampler | None = None
    ) -> None:
        if isinstance(loss, type):
            raise TypeError(f"the loss is a class: pass an instance of it, {loss.__name__}()")
        if not callable(loss):
            raise TypeError(f"a loss is a function of (outputs, targets), got {type(loss).__name__}")
        reduction = getattr(loss, "reduction", "mean")
        # PyTorch's nn.KLDivLoss names the mean over examples "batchmean"; its "mean" is one over all outputs.
        if reduction not in ("mean", "batchmean"):
            raise ValueError(
                f"{_name(loss)} has reduction='{reduction}': pass a mean over examples, reduction='mean'"
            )
        self.loss = loss
        self.reduction = "mean"
        self._is_psd, self._sample = is_psd, sample_targets
        self._tried = False
        self._single: tuple[Tensor, Tensor] | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the examples, ()."""
        return self.loss(outputs, targets)

    @property
    def is_psd(self) -> bool | None:
        """As declared; None where it was not."""
        return self._is_psd

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless the loss is a mean over examples, at these outputs.

        By the loss of the batch against that of its examples one by one, at every batch: class weights, and
        ignored targets, look like a plain mean where all examples of a batch are alike. The first time also by
        gradients. An example alone is tried together with the one before it.
        """
        if len(outputs) != len(targets):
            raise ValueError(f"there are {len(outputs)} outputs and {len(targets)} targets")
        h = outputs.detach()
        if not self._tried:
            _try_alone(self.loss, h, targets)
            self.by_vmap = _can_vmap(self.loss, h, targets)
        h, targets = at_least_single(h, targets)
        if len(h) == 1:
            h, targets = self._beside_the_last(h, targets)
        whole, own = self._whole(h, targets), self.per_example(h, targets)
        tolerance = max(1e-6, 1000 * torch.finfo(h.dtype).eps)
        size = float(own.abs().mean()) + torch.finfo(h.dtype).tiny
        if not bool(own.isfinite().all()):
            rows = (~own.isfinite()).nonzero().flatten()[:5].tolist()
            raise ValueError(
                f"{_name(self.loss)} is not finite for some outputs and targets (rows {rows} of {len(h)}): look "
                "for NaN in the targets, or for examples of which every target is ignored."
            )
        if abs(float(whole - own.sum())) <= tolerance * size * len(h) and size > 1e-30 and float(own.sum()) != 0:
            raise ValueError(
                f"{_name(self.loss)} is a sum over examples ({float(whole):.6g} for {len(h)}): return the mean, "
                "e.g. losses.mean() instead of losses.sum()."
            )
        alike = abs(float(whole - own.mean())) <= tolerance * size
        one_axis_off = h.shape != targets.shape and h.squeeze(-1).shape == targets.squeeze(-1).shape
        meets = one_axis_off and targets.is_floating_point() and self._meets_others(h, targets, tolerance)
        if meets or not (alike and (self._tried or self._gradients_alike(h, targets, tolerance))):
            if one_axis_off:
                raise ValueError(
                    f"{_name(self.loss)} pairs every output with every target: outputs {tuple(h.shape)} and "
                    f"targets {tuple(targets.shape)} are broadcast. A missing axis is added by "
                    f"{'targets' if targets.ndim < h.ndim else 'outputs'}.unsqueeze(-1)"
                )
            raise ValueError(
                f"{_name(self.loss)} is no mean over examples: {float(whole):.6g} for a batch of {len(h)}, and "
                f"{float(own.mean()):.6g} in the mean for each alone. Its examples meet (contrastive losses, "
                "statistics of the batch, a mean over predictions of which examples have different numbers), or "
                "it is scaled by their number: return losses.mean() with one loss for each example, from its own "
                "outputs alone. Sums over predictions and class weights: nn.CrossEntropyLoss has them."
            )
        self._tried = self._tried or bool(own.any())

    def _beside_the_last(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return an example with the single one before it, or twice where there is none like it: a sum shows."""
        one, last = (h, targets), self._single
        self._single = one
        kinds = [[(t.shape, t.dtype, t.device) for t in pair] for pair in (one, last or one)]
        first, second = last if last is not None and kinds[0] == kinds[1] else one, one
        return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])

    def _meets_others(self, h: Tensor, targets: Tensor, tolerance: float) -> bool:
        """Whether outputs that are their own targets have another loss together than one by one.

        Elsewhere a loss that pairs all with all may look like a mean: |h - y| does where every y is above h.
        """
        outputs = targets.reshape(h.shape).to(h)
        whole, own = self._whole(outputs, targets), self.per_example(outputs, targets).mean()
        return abs(float(whole - own)) > tolerance * max(1.0, abs(float(whole)))  # False where one is nan

    def _gradients_alike(self, h: Tensor, targets: Tensor, tolerance: float) -> bool:
        with torch.enable_grad():
            gradient = grad(lambda outputs: self._whole(outputs, targets))(h) * len(h)
            expected = grad(lambda outputs: self.per_example(outputs, targets).sum())(h)
        scale = float(expected.norm()) + torch.finfo(h.dtype).tiny
        return float((gradient - expected).norm()) <= tolerance * scale

    def counts(self, targets: Tensor) -> Tensor:
        """Return one for each example, (N,)."""
        return torch.ones(len(targets), device=targets.device)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example alone, (N,): together through `vmap`, or one by one.

        `vmap` refuses functions that branch on values (F.gaussian_nll_loss checks its variances).
        """
        try:
            return _together(self.loss, outputs, targets)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            return torch.stack([self.loss(h[None], y[None]) for h, y in zip(outputs, targets, strict=True)])

    def total(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum over the examples; without weights by one call: the mean times their number."""
        if weights is not None:
            return (weights * self.per_example(outputs, targets)).sum()
        return self._whole(outputs, targets) * len(outputs)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of the sum by the outputs, by autograd."""
        found: Tensor = grad(lambda h: self.total(h, targets))(outputs)
        return found

    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return S t by a second reverse pass: S is symmetric, and its blocks are those of single examples."""
        product = vjp(grad(partial(self.total, targets=targets)), outputs)[1]
        alone = tangents.ndim == outputs.ndim
        (found,) = product(tangents) if alone else vmap(product)(tangents)
        result: Tensor = found
        return result

    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets by the user's function."""
        if self._sample is None:
            raise TypeError(
                f"no Fisher matrix is defined for {_name(self.loss)}: it takes labels drawn from the model's own "
                "distribution, which the function does not say. Use GaussNewtonOperator, kind='empirical', or "
                "FunctionLoss(loss, sample_targets=...) where the loss is -log p of a distribution p."
            )
        return self._sample(outputs, targets, generator)

    def _whole(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = self.loss(outputs, targets)
        if not isinstance(value, Tensor) or value.ndim != 0:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{_name(self.loss)} returns {got} for a batch: return one number, the mean over its examples, "
                "e.g. losses.mean()."
            )
        return value

    # ------------------------------------------------------------------- tried on the first examples
    @torch.inference_mode(False)
    @torch.no_grad()
    def try_on_first_examples(
        self, function: ModelFunction, batches: Iterable[Batch], count: int = EXAMPLES_TRIED
    ) -> None:
        """Refuse now what is no mean over examples: later the matrix would be wrong without a word.

        Cost: a forward of a few examples.
        """
        outputs, targets = _first_outputs(function, batches, count)
        self.check(outputs, targets)
        try:
            self.hessian_product(outputs[:1], targets[:1], outputs[:1])
        except RuntimeError as error:
            if "is not implemented" in str(error):
                raise NotImplementedError(
                    f"PyTorch has no second derivative of {_name(self.loss)} ({error}): write it as a function of "
                    "elementary ones, (1 + outputs - outputs.gather(1, targets[:, None])).clamp(min=0) say"
                ) from error
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def warn_if_linear(self, function: ModelFunction, batches: Iterable[Batch]) -> None:
        """Warn where S = ∇²l is exactly zero at the first examples: of nn.NLLLoss and nn.L1Loss it is everywhere.

        The Gauss-Newton matrix is then zero, and (G + damping I)⁻¹ b only b / damping. Along one direction, in
        which every output has another weight, so that nothing cancels but by chance.
        """
        outputs, targets = _first_outputs(function, batches)
        weights = torch.linspace(1, 2, outputs.numel(), device=outputs.device).sqrt().view_as(outputs)
        if not bool(self.hessian_product(outputs, targets, weights.to(outputs.dtype)).any()):
            warnings.warn(
                f"{_name(self.loss)} is linear in the outputs at the first {len(outputs)} examples: its "
                "Gauss-Newton matrix is zero there, and (G + damping I)⁻¹ b only b / damping. nn.NLLLoss: let the "
                "model end at its logits, and pass nn.CrossEntropyLoss(). nn.L1Loss: nn.HuberLoss() and "
                "nn.SmoothL1Loss() are curved near zero. HessianOperator takes the loss as it is.",
                stacklevel=3,
            )


def _first_outputs(
    function: ModelFunction, batches: Iterable[Batch], count: int = EXAMPLES_TRIED
) -> tuple[Tensor, Tensor]:
    inputs, targets = next(iter(batches))
    few = slice(0, count)
    outputs = function(function.parameters, take(inputs, few))
    check_finite(outputs)
    return outputs, targets[few]


def _try_alone(loss: LossFunction, outputs: Tensor, targets: Tensor) -> None:
    """Raise a TypeError unless the loss takes (outputs, targets) and returns a tensor."""
    try:
        inspect.signature(loss).bind(outputs, targets)
    except TypeError as error:
        raise TypeError(f"{_name(loss)} is called as loss(outputs, targets): {error}") from None
    except ValueError:
        pass  # a function written in C has no signature
    found = loss(outputs, targets)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{_name(loss)} returns {type(found).__name__}: return a tensor, so that autograd knows it"
        )
    if found.is_complex():
        raise TypeError(f"{_name(loss)} returns complex numbers: return real ones")
    with torch.enable_grad():
        if loss(outputs.detach(), targets).requires_grad:
            raise ValueError(
                f"{_name(loss)} reads parameters beside the outputs, and derivatives here are by these alone: "
                "leave a penalty on weights out (`train` takes weight_decay, curvature damping), detach constants."
            )
        if not loss(outputs.detach().requires_grad_(), targets).requires_grad:
            raise ValueError(
                f"{_name(loss)} has no derivative by the outputs (detach, argmax, no_grad): all that follows from "
                "it would be zero. Return a differentiable function of the outputs."
            )


def _can_vmap(loss: LossFunction, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether `vmap` takes the function and its gradient, as F.one_hot's is not; tried on one example."""

    def value(output: Tensor, target: Tensor) -> Tensor:
        return loss(output[None], target[None]).sum()

    try:
        vmap(grad(value))(outputs[:1].detach(), targets[:1])
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return False
    return True


def _together(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    losses: Tensor = vmap(lambda output, target: loss(output[None], target[None]))(outputs, targets)
    return losses


def _name(loss: LossFunction) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
