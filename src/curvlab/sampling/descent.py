"""How far the weights lie above the minimum that chains find around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlab.problem import Data, Loss
from curvlab.sampling.sgld import check_nbeta, default_nbeta
from curvlab.training import EnsembleLosses


def descent_to_minimum(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    localization: float,
    nbeta: float | None = None,
    max_steps: int = 60,
    weights: Tensor | None = None,
) -> float:
    """Return nbeta (L(w0) - L(w*)), w* the minimum of nbeta L(w) + localization/2 |w - w0|² found from w0.

    λ(w0) = nbeta (E[L] - L(w0)) is a learning coefficient where w0 is a minimum. Chains that start above one
    settle around w*, and `estimate_llc` is too low by this much, in its own unit: at n = 10,000 a loss that would
    still fall by 0.01 takes 11 from it. The estimate plus the descent is what the same chains give measured from
    w* (`LLC.from_minimum`). L-BFGS looks for it; where max_steps end the search, the result is a lower bound.

    Args:
        model: as for `estimate_llc`.
        loss: likewise.
        data: likewise; all of it in one batch.
        localization: γ, that of the estimate.
        nbeta: that of the estimate; None: n / ln n.
        max_steps: of L-BFGS.
        weights: as for `estimate_llc`.

    Cost: about 1.3 gradients of all the data for each step.
    """
    losses = EnsembleLosses(model, loss, data, example_weights=weights)
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    batch = losses.batch(None)
    position = losses.start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([position], max_iter=max_steps, history_size=20, line_search_fn="strong_wolfe")

    def at(point: Tensor) -> tuple[Tensor, list[Tensor]]:
        return losses.losses_and_gradients(point[None], batch, shared=True, weights=losses.weights_of(None, 1))

    def closure() -> Tensor:
        value, gradients = at(position.detach())
        moved = position.detach() - losses.start
        slope = torch.cat([gradient.flatten() for gradient in gradients])
        position.grad = nbeta * slope + localization * moved
        return nbeta * value[0] + localization / 2 * moved.square().sum()

    optimizer.step(closure)
    start, end = (at(point)[0][0] for point in (losses.start, position.detach()))
    return max(0.0, nbeta * float(start - end))
