"""The loss of a batch as a weighted mean over its examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from curvlab.problem import OutputLoss, output_loss
from curvlab.problem.batch import Inputs
from curvlab.problem.function_loss import FunctionLoss, single_losses
from curvlab.problem.two_readings import refuse_two_readings

Loss: TypeAlias = nn.Module | Callable[[Tensor, Tensor], Tensor]


class MeanLoss:
    """L_B = 1/|B| sum_{i in B} w_i l_i, with w_i = 1 where no weights are given.

    l_i is scaled so that equal weights of 1 give the loss itself: for language models l_i is the summed loss of
    sequence i, times |B| over the number of tokens that the batch predicts. The sum is divided by the number of
    examples of the batch, never by the sum of the weights: L_B is linear in the weights, dL_B/dw_i = l_i / |B|,
    and an example of weight 0 is removed while the others keep the weight they had. To have the mean over the
    remaining ones, give them the weight N / (number of remaining examples).

    Logits are (B, C), or (B, T, V) with one label for each position, where classes come last.

    Args:
        loss: mean over examples: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), another module, or a
            function of (outputs, targets).
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return L_B, (); `weights` is (B,)."""
        if weights is not None:
            return (self.per_example(outputs, targets) * weights).mean()
        if isinstance(self.loss, nn.CrossEntropyLoss) and _is_sequence(outputs, targets):
            refuse_two_readings(outputs, targets)
            return self.loss(outputs.flatten(0, -2), targets.flatten())
        return self.loss(outputs, targets)

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return l_i, (B,), whose mean is L_B without weights."""
        if getattr(self.loss, "reduction", "mean") != "mean":
            raise ValueError(
                f"reduction='{self.loss.reduction}': weights of examples are those of a mean, "  # type: ignore[union-attr]
                "so the loss needs reduction='mean'"
            )
        known = closed_form(self.loss)
        if known is None:
            return own_losses(self.loss, outputs, targets)
        known.check(outputs, targets)
        return known.per_example(outputs, targets) * (len(targets) / known.count(targets))


def own_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each example alone, (B,), of a loss that is only known as a function."""
    return single_losses(loss, outputs, targets)


def closed_form(loss: Loss) -> OutputLoss | None:
    """Return the closed forms of a PyTorch loss, or None for a loss that is only known as a function."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.MSELoss | nn.BCEWithLogitsLoss | FunctionLoss):
        return output_loss(loss)
    return None


def model_outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return what the model computes: a tensor, or the `.logits` of a Hugging Face model's record."""
    outputs = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def _is_sequence(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.ndim > 2 and not torch.is_floating_point(targets) and outputs.shape[:-1] == targets.shape
