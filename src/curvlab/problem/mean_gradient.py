"""The gradient of the mean loss over the data."""

from __future__ import annotations

from functools import partial, reduce

import torch
from torch import Tensor, nn

from curvlab.linalg import flatten
from curvlab.problem.batches import Batch, Batches, Data
from curvlab.problem.known_losses import output_loss
from curvlab.problem.memory import PassSize
from curvlab.problem.model_function import ModelFunction, check_finite


def mean_gradient(model: nn.Module, loss: nn.Module, data: Data, *, batch_size: int = 512) -> Tensor:
    """Return ∇L = 1/n Σ ∇l by the trainable parameters, (P,), scaled as HessianOperator's matrix is.

    n is what the loss's mean divides by, over all of the data: examples, predicted tokens, single outputs of
    nn.MSELoss; 1 for reduction="sum". For batches of different numbers of tokens that is not the mean of the
    batches' own gradients.

    Args:
        model: in eval mode; parameters that require gradients, in named_parameters() order.
        loss: as for the operators.
        data: likewise.
        batch_size: examples at a time, for pairs and datasets.

    Cost: one forward and one backward of the data, half of a batch at a time whenever memory runs out, with a
    MemoryWarning.
    """
    total, count = summed_gradient(model, loss, data, batch_size=batch_size)
    if count == 0:
        raise ValueError("every target is ignored (ignore_index): the mean over predictions has no terms")
    return total / count


@torch.inference_mode(False)
def summed_gradient(
    model: nn.Module, loss: nn.Module, data: Data, *, batch_size: int = 512
) -> tuple[Tensor, float]:
    """Return Σ ∇l, (P,), and the n that `mean_gradient` divides it by."""
    function, known = ModelFunction(model), output_loss(loss)
    total = torch.zeros(function.num_parameters, dtype=function.dtype, device=function.device)
    count = 0.0
    passes = PassSize(examples=None, columns=1)

    def of_piece(piece: Batch) -> Tensor:
        inputs, targets = piece
        leaves = [value.detach().requires_grad_() for value in function.parameters]
        with torch.enable_grad():
            outputs = function(leaves, inputs)
            check_finite(outputs)
            known.check(outputs, targets)
            value = known.per_example(outputs, targets).sum()
            return flatten(torch.autograd.grad(value, leaves, materialize_grads=True))

    def of_batch(batch: Batch) -> Tensor:
        return reduce(torch.add, map(of_piece, passes.pieces(batch)))

    for batch in Batches.of(function, data, batch_size=batch_size):
        total += passes.run(partial(of_batch, batch), columns=1)
        count += known.count(batch[1])
    return total, 1.0 if known.reduction == "sum" else count
