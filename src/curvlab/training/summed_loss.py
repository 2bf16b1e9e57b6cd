"""A mean loss as a sum over examples, so that batches of copies share one divisor, with or without weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from curvlab.problem import OutputLoss
from curvlab.training.mean_loss import Loss, closed_form, own_losses


def known_loss(loss: Loss) -> OutputLoss | None:
    """Return the closed forms of a mean over examples, None where there are none; refuse other reductions."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(f"reduction='{reduction}': losses here are means over examples, reduction='mean'.")
    return closed_form(loss)


def summed_loss(loss: Loss) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the loss as a weighted sum over examples, to be divided by a count that all batches share."""
    known = known_loss(loss)

    def summed(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        if known is None and weights is None:
            whole: Tensor = loss(outputs, targets) * len(targets)
            return whole
        own = own_losses(loss, outputs, targets) if known is None else known.per_example(outputs, targets)
        return own.sum() if weights is None else own @ weights.to(own)

    return summed


def check_mean(loss: Loss, outputs: Tensor, targets: Tensor, own: Tensor) -> None:
    """Refuse a loss that is no mean over examples; `own` are those of each of them."""
    whole, mean = float(loss(outputs, targets)), float(own.double().mean())
    if own.ndim != 1 or abs(whole - mean) > 1e-3 * (abs(mean) + float(own.abs().double().mean())) + 1e-6:
        raise ValueError(
            f"the loss of a batch ({whole:.6g}) is not the mean of its examples' losses ({mean:.6g}): pass a "
            "function of (outputs, targets) that is a mean over examples, e.g. a sum over outputs, then .mean()."
        )
