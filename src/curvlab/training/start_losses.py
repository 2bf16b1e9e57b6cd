"""Losses of all examples at a model's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from curvlab.problem import Batches, ModelFunction
from curvlab.problem.batch import Batch
from curvlab.problem.function_loss import can_vmap
from curvlab.problem.memory import PassSize
from curvlab.training.mean_loss import Loss, own_losses
from curvlab.training.summed_loss import check_mean, known_loss


def start_losses(
    function: ModelFunction, values: Sequence[Tensor], loss: Loss, batches: Batches
) -> tuple[Tensor, float, bool]:
    """Return each example's summed loss over the mean count, (N,), that count, and whether the loss has a vmap.

    The count is that of an example's predictions, 1 where it is not a sequence. Model and loss are checked: both
    must be of single examples, and the losses finite, or a ValueError says what to change. Cost: one forward of
    the data, half of a batch at a time whenever memory runs out, with a MemoryWarning.
    """
    known = known_loss(loss)
    passes, loss_can = PassSize(examples=None, columns=1), True

    def of_batch(batch: Batch) -> list[Tensor]:
        nonlocal loss_can
        found = []
        for inputs, targets in passes.pieces(batch):
            outputs = function(values, inputs)  # checks that it is a function of single examples
            if known is None:
                own = own_losses(loss, outputs, targets)
                loss_can = loss_can and can_vmap(loss, outputs, targets)
                check_mean(loss, outputs, targets, own)
            else:
                known.check(outputs, targets)
                own = known.per_example(outputs, targets)
            found.append(own)
        return found

    losses: list[Tensor] = []
    count, size = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            losses += passes.run(partial(of_batch, batch), columns=1)
            targets = batch[1]
            count += len(targets) if known is None else known.count(targets)
            size += len(targets)
    mean_count = count / size
    found = torch.cat(losses) / mean_count
    if not bool(torch.isfinite(found).all()):
        raise ValueError("the loss at the model's parameters is not finite: check them, and the inputs, for NaN")
    return found, mean_count, loss_can
