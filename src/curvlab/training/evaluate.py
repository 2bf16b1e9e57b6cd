"""Loss and accuracy of a model on a data set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.problem import Batches, Data, Problem, output_loss
from curvlab.problem.closed_forms import has_ambiguous_classes
from curvlab.problem.memory import with_halving
from curvlab.problem.model_function import eval_mode
from curvlab.progress import can_be_silent, progress_bar
from curvlab.training.steps import Loss, MeanLoss, model_outputs, opened


@dataclass(frozen=True)
class Evaluation:
    """Measured in eval mode, over all examples.

    Attributes:
        loss: mean over examples; of cross-entropy over predictions (tokens): in nats, exp of it is the perplexity.
        accuracy: share of predictions that are right, in [0, 1]: tokens of sequences, labels of examples with
            several; None for regression.
        num_examples: how many.
        num_predictions: that `accuracy` is a share of; without an accuracy the number of examples.
    """

    loss: float
    accuracy: float | None
    num_examples: int
    num_predictions: int


@can_be_silent
def evaluate(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    batch_size: int = 512,
    progress: bool = True,
) -> Evaluation:
    """Return loss and accuracy of `model` on `data`. Cost: one forward pass over the data.

    A prediction is the largest output for integer targets, (B,) or (B, T), of which ignored ones do not count, and
    the sign of each output for nn.BCEWithLogitsLoss. No module's train or eval mode is changed in the end.

    Args:
        model: on the device to compute on; or a `Problem` without weights in the place of model, loss and data.
        loss: mean over the batch.
        data: as for `train`.
        batch_size: in examples; half as many whenever memory runs out, with a MemoryWarning.
        progress: show a bar.
    """
    model, loss, examples, weights = opened(model, loss, data)
    if weights is not None:
        raise ValueError("evaluate counts every example once: pass a problem without weights")
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):  # nn.KLDivLoss calls its mean over examples the latter
        raise ValueError(f"evaluate needs a loss with reduction='mean', got '{reduction}'")
    if examples.num_examples == 0:
        raise ValueError("data is empty: at least one example is needed")
    size = min(whole("batch_size", batch_size), examples.num_examples)
    return with_halving(lambda at_once: _evaluated(model, loss, examples, at_once), size)


def _evaluated(model: nn.Module, loss: Loss, examples: Batches, batch_size: int) -> Evaluation:
    known, size = output_loss(loss), examples.num_examples
    total, count, correct, num_predictions = 0.0, 0.0, 0, 0
    with eval_mode(model), torch.no_grad():
        batches = progress_bar("evaluation", examples.in_turn(batch_size), total=-(-size // batch_size))
        for inputs, targets in batches:
            outputs = model_outputs(model, inputs)
            counted = known.count(targets) if known.token_wise else len(targets)
            if counted:  # else every target is ignored
                total += MeanLoss(loss)(outputs, targets).item() * counted
                count += counted
            right = _right(loss, outputs, targets)
            if right is not None:
                correct, num_predictions = correct + int(right.sum()), num_predictions + right.numel()
    if count == 0:
        raise ValueError("every target is ignored (ignore_index): there is no prediction to evaluate")
    accuracy = correct / num_predictions if num_predictions else None
    return Evaluation(total / count, accuracy, size, num_predictions or size)


def _right(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return which predictions are right, (number of predictions,); None where there are none."""
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return ((outputs > 0) == (targets > 0.5)).flatten()
    fits = outputs.shape[:-1] == targets.shape and not has_ambiguous_classes(outputs, targets)
    if targets.is_floating_point() or not fits:
        return None
    return (outputs.argmax(-1) == targets)[targets != getattr(loss, "ignore_index", -100)]
