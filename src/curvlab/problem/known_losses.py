"""From a PyTorch loss to its derivatives by the outputs: closed forms where they are known, autograd elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.class_weights import WeightedBinaryCrossEntropy, WeightedCrossEntropy
from curvlab.problem.function_loss import FunctionLoss, LossFunction
from curvlab.problem.losses import BinaryCrossEntropy, CrossEntropy, OutputLoss, SquaredError

Loss: TypeAlias = nn.Module | LossFunction | OutputLoss


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
        return _FUNCTIONS[loss]()
    for kind, closed_form in _CLOSED_FORMS.items():
        # A forward of its own has derivatives of its own.
        if isinstance(loss, kind) and type(loss).forward is kind.forward and "forward" not in vars(loss):
            return closed_form(loss)
    return FunctionLoss(loss)


def of_mean_weight_one(loss: Loss, targets: Iterable[Tensor]) -> Loss:
    """Return an equal loss with class weights whose mean over these targets is one; others as they are.

    A mean over all targets does not change. The loss of a single example is then its term of that mean, as it is
    without class weights: influence, whose unit is a weight added to that term, needs it so. In a sum its weighted
    loss is its term already.
    """
    known = output_loss(loss)
    if not isinstance(known, WeightedCrossEntropy) or known.reduction == "sum":
        return loss
    return known.of_mean_weight_one(list(targets))


def _cross_entropy(loss: nn.CrossEntropyLoss) -> OutputLoss:
    return CrossEntropy(loss) if loss.weight is None else WeightedCrossEntropy(loss)


def _binary_cross_entropy(loss: nn.BCEWithLogitsLoss) -> OutputLoss:
    plain = loss.weight is None and loss.pos_weight is None
    return BinaryCrossEntropy(loss) if plain else WeightedBinaryCrossEntropy(loss)


_CLOSED_FORMS: dict[type[nn.Module], Callable[[Any], OutputLoss]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.MSELoss: SquaredError,
    nn.BCEWithLogitsLoss: _binary_cross_entropy,
}
_FUNCTIONS: dict[Any, Callable[[], OutputLoss]] = {
    functional.cross_entropy: lambda: CrossEntropy(nn.CrossEntropyLoss()),
    functional.mse_loss: lambda: SquaredError(nn.MSELoss()),
    functional.binary_cross_entropy_with_logits: lambda: BinaryCrossEntropy(nn.BCEWithLogitsLoss()),
}
