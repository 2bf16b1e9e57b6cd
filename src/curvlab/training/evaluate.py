"""Loss and accuracy of a model on a data set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.problem.examples import Pairs
from curvlab.problem.memory import with_halving
from curvlab.problem.two_readings import has_two_readings
from curvlab.training.mean_loss import Loss, MeanLoss, closed_form, model_outputs
from curvlab.training.own_batches import OwnBatches, TrainingData, readable, select
from curvlab.training.training_mode import eval_mode


@dataclass(frozen=True)
class Evaluation:
    """Measured in eval mode, over all examples.

    Attributes:
        loss: mean over examples.
        accuracy: share predicted right, in [0, 1]; None for regression.
        num_examples: how many.
    """

    loss: float
    accuracy: float | None
    num_examples: int


def evaluate(model: nn.Module, loss: Loss, data: TrainingData, *, batch_size: int = 512) -> Evaluation:
    """Return loss and accuracy of `model` on `data`. Cost: one forward pass over the data.

    Accuracy is of the largest output for integer targets (B,), and of the output's sign for
    nn.BCEWithLogitsLoss. No module's train or eval mode is changed in the end.

    Args:
        model: on the device to compute on.
        loss: mean over the batch.
        data: map-style dataset of (input, target), a pair of tensors, or mappings as for `train`: the mean is then
            over all predictions (tokens) and there is no accuracy of tokens.
        batch_size: in examples; half as many whenever memory runs out, with a MemoryWarning.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(f"evaluate needs a loss with reduction='mean', got '{reduction}'")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    examples = readable(model, data)
    size = num_examples(examples)

    def in_batches(at_once: int) -> Evaluation:
        return _evaluated(model, loss, examples, at_once, size=size)

    return with_halving(in_batches, min(batch_size, size))


def _evaluated(
    model: nn.Module, loss: Loss, examples: Pairs | OwnBatches, batch_size: int, *, size: int
) -> Evaluation:
    read = isinstance(examples, OwnBatches)
    known = closed_form(loss) if read else None
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    total_loss, total_count, num_correct, has_accuracy = 0.0, 0.0, 0, True
    with eval_mode(model), torch.no_grad():
        for chosen in torch.arange(size).split(batch_size):
            inputs, targets = select(examples, chosen, device)
            outputs = model_outputs(model, inputs)
            count = len(chosen) if known is None else known.count(targets)
            total_loss += MeanLoss(loss)(outputs, targets).item() * count
            total_count += count
            correct = None if read and targets.ndim > 1 else _num_correct(loss, outputs, targets)
            has_accuracy = correct is not None
            num_correct += correct or 0
    accuracy = num_correct / size if has_accuracy else None
    return Evaluation(loss=total_loss / total_count, accuracy=accuracy, num_examples=size)


def num_examples(data: Pairs | OwnBatches) -> int:
    """Return the number of examples, or raise a ValueError when there are none."""
    if isinstance(data, tuple):
        inputs, targets = data
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs and {len(targets)} targets: they must agree")
        size = len(inputs)
    else:
        size = len(data)  # type: ignore[arg-type]
    if size == 0:
        raise ValueError("the data set is empty: at least one example is needed")
    return size


def _num_correct(loss: Loss, outputs: Tensor, targets: Tensor) -> int | None:
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return int(((outputs > 0) == (targets > 0.5)).sum())
    if targets.is_floating_point() or has_two_readings(outputs, targets):
        return None
    if outputs.shape[:-1] == targets.shape:
        return int((outputs.argmax(-1) == targets).sum())
    return None
