"""How far the weights lie above the minimum that chains find around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.arguments import not_negative, whole
from curvlab.problem import Data, Loss, Problem
from curvlab.sampling.sgld import check_nbeta, default_nbeta
from curvlab.training import EnsembleLosses

_SETTLED = 0.01  # of the descent, or of one unit of the LLC where that is more


@dataclass(frozen=True)
class Descent:
    """How far the weights lie above the lowest point of the region that chains sample.

    Attributes:
        value: nbeta (L(w0) - L(w*)), in units of the LLC; a lower bound where the search has not converged.
        converged: whether L-BFGS stopped by itself, or the last quarter of its steps added less than a hundredth.
        num_steps: of L-BFGS.
    """

    value: float
    converged: bool
    num_steps: int


@torch.inference_mode(False)
def descent_to_minimum(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    localization: float,
    nbeta: float | None = None,
    max_steps: int = 60,
    weights: Tensor | None = None,
) -> Descent:
    """Return nbeta (L(w0) - L(w*)), w* the minimum of nbeta L(w) + localization/2 |w - w0|² found from w0.

    w* is the lowest point of the region that chains sample; the loss itself still has a slope there.
    λ(w0) = nbeta (E[L] - L(w0)) is a learning coefficient where w0 is a minimum. Chains that start above one
    settle around w*, and `estimate_llc` is too low by this much, in its own unit: at n = 10,000 a loss that would
    still fall by 0.01 takes 11 from it. The estimate plus the descent is what the same chains give measured from
    w* (`LLC.from_lowest_point`). L-BFGS looks for it; `Descent.converged` says whether max_steps ended the search.

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
    whole("max_steps", max_steps)
    not_negative("localization", localization)
    losses = EnsembleLosses(model, loss, data, weights=weights)
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    batch = losses.batch(None)
    position = losses.start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([position], max_iter=max_steps, history_size=20, line_search_fn="strong_wolfe")

    def at(point: Tensor) -> tuple[Tensor, list[Tensor]]:
        return losses.losses_and_gradients(point[None], batch, shared=True, weights=losses.weights_of(None, 1))

    lowest: list[float] = []  # so far, at each gradient

    def closure() -> Tensor:
        value, gradients = at(position.detach())
        moved = position.detach() - losses.start
        slope = torch.cat([gradient.flatten() for gradient in gradients])
        position.grad = nbeta * slope + localization * moved
        objective = nbeta * value[0] + localization / 2 * moved.square().sum()
        lowest.append(min([float(objective), *lowest[-1:]]))
        return objective

    optimizer.step(closure)
    num_steps = int(optimizer.state[position]["n_iter"])
    at_its_end = num_steps == max_steps or len(lowest) >= max_steps * 5 // 4  # of gradients, that of L-BFGS itself
    late_on = max(0, min(3 * len(lowest) // 4, len(lowest) - 2))
    late, fall = (lowest[place] - lowest[-1] for place in (late_on, 0))
    start, end = (at(point)[0][0] for point in (losses.start, position.detach()))
    converged = not at_its_end or late <= _SETTLED * max(fall, 1.0)
    return Descent(max(0.0, nbeta * float(start - end)), converged, num_steps)
