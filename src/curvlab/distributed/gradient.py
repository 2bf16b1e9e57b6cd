"""The gradient of the mean loss over examples that are spread over processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad

from curvlab.curvature import Batches, Data, ModelFunction, output_loss
from curvlab.curvature.model_function import check_finite
from curvlab.distributed.ranks import Ranks
from curvlab.linalg import flatten


def mean_gradient(
    model: nn.Module, loss: nn.Module, share: Data, *, batch_size: int = 512, ranks: Ranks | None = None
) -> Tensor:
    """Return ∇L = 1/n sum over all ranks' examples of ∇l, (P,), the same on every rank.

    n is what the loss's mean divides by (predicted tokens for language models; 1 for reduction="sum"), counted
    over all ranks: shares may be of any sizes. It is a right-hand side for any solver, of `DataParallelOperator`
    too.

    Args:
        model: the same on every rank, in eval mode.
        loss: see GaussNewtonOperator.
        share: this rank's own examples.
        batch_size: examples at a time.
        ranks: the process group's by default.

    Cost: 3F of the share, F a forward, and one all-reduce of P numbers.
    """
    ranks = Ranks.current() if ranks is None else ranks
    function, known = ModelFunction(model), output_loss(loss)
    total = torch.zeros(function.num_parameters, dtype=function.dtype, device=function.device)
    count = 0.0
    for inputs, targets in Batches(share, batch_size=batch_size, device=function.device, dtype=function.dtype):
        with torch.no_grad():
            outputs = function(function.parameters, inputs)
        check_finite(outputs)
        known.check(outputs, targets)

        def summed(values: Sequence[Tensor], inputs=inputs, targets=targets) -> Tensor:  # type: ignore[no-untyped-def]
            return known.per_example(function(values, inputs), targets).sum()

        total += flatten(grad(summed)(function.parameters)).detach()
        count += known.count(targets)
    divisor = 1.0 if known.reduction == "sum" else float(sum(ranks.gather(count)))
    if divisor == 0:
        raise ValueError("every target of every rank is ignored (ignore_index): the mean has no terms")
    return ranks.sum(total) / divisor
