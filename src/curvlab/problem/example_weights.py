"""Weights of examples in the mean loss: what holds for them wherever they are taken."""

from __future__ import annotations

from torch import Tensor


def checked_weights(weights: Tensor, num_examples: int) -> Tensor:
    """Return w of the mean loss L = 1/n Σ_i w_i l_i, (N,), without graph, or raise a ValueError.

    One convention: the sum is divided by n, as without weights, and never by the sum of the weights. A weight of 2
    is an example that stands twice in a data set whose n is not raised; 0 takes an example away and leaves the
    others as they were. For the mean over the sum of the weights, pass weights * len(weights) / weights.sum().
    """
    if weights.shape != (num_examples,):
        raise ValueError(f"need one weight for each of {num_examples} examples, got shape {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("weights must be finite and not negative")
    return weights.detach()
