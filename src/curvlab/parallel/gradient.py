"""The gradient of the mean loss over examples that are spread over processes."""

from __future__ import annotations

from torch import Tensor, nn

from curvlab.problem import Data, Problem
from curvlab.ranks import Ranks


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
    own = Problem.of(model, loss, share, batch_size=batch_size)
    total = own.part(divisor=1.0).gradient()
    divisor = 1.0 if own.loss.reduction == "sum" else float(sum(ranks.gather(own.total_count)))
    if divisor == 0:
        raise ValueError("every target of every rank is ignored (ignore_index): the mean has no terms")
    return ranks.sum(total) / divisor
