"""The |B| below which the second moment diverges, as printed and exactly, and the |B| of the trials around it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.lissa.lemma1 import moments
from experiments.lissa.lemma1.trials import SignedFeatures


def recommended_step_size(eigenvalues: Tensor, damping: float) -> float:
    """Return 1 / (λmax + damping) of Corollary 1; the step sizes of the lemma go up to 1 / λmax."""
    return 1 / (float(eigenvalues.max()) + damping)


def thresholds(eigenvalues: Tensor, damping: float) -> dict[str, float]:
    """Return the |B| below which the second moment diverges: as printed, by R, exactly; and radii at R's.

    At 1 / (λmax + damping), and (`_largest`) at 1 / λmax, the largest step size that the lemma admits.
    """
    found = {"printed": moments.printed_threshold(eigenvalues, damping)}
    for suffix, step_size in (
        ("", recommended_step_size(eigenvalues, damping)),
        ("_largest", 1 / float(eigenvalues.max())),
    ):
        sufficient = moments.sufficient_threshold(eigenvalues, damping, step_size=step_size)
        found["sufficient" + suffix] = sufficient
        found["exact" + suffix] = moments.exact_threshold(eigenvalues, damping, step_size=step_size)
        batch_size = max(math.floor(sufficient), 1)  # the largest for which R has an eigenvalue of at least 1
        settings = {"step_size": step_size, "batch_size": batch_size}
        found["batch_size" + suffix] = batch_size
        found["printed_radius" + suffix] = float(moments.printed_matrix(eigenvalues, damping, **settings).max())
        found["radius" + suffix] = moments.spectral_radius(eigenvalues, damping, **settings)
    return found


def condition_constant(eigenvalues: Tensor) -> float:
    """Return |B| [E‖H_t v‖² - ‖H v‖²] / (tr(H) vᵀHv) for v the top eigenvector, equal in all draws."""
    v = torch.zeros(len(eigenvalues), 8, dtype=eigenvalues.dtype)
    v[int(eigenvalues.argmax())] = 1
    operator = SignedFeatures(eigenvalues, num_trials=8)
    drawn = operator.sample(1, torch.Generator().manual_seed(0)) @ v
    squares = drawn.square().sum(0) - (operator @ v).square().sum(0)
    return float((squares / (eigenvalues.sum() * (v * (operator @ v)).sum(0))).mean())


def batch_sizes(eigenvalues: Tensor, damping: float) -> dict[str, int]:
    """Return whole |B| by role: half, below, between the exact threshold and R's, double the paper's."""
    limits = thresholds(eigenvalues, damping)
    exact, sufficient = limits["exact"], limits["sufficient"]
    found = {"half": max(math.floor(exact / 2), 1), "below": max(math.floor(exact), 1)}
    if (between := math.floor(exact) + 1) <= sufficient:
        found["between"] = between
    found["double"] = math.ceil(2 * limits["printed"])
    return {role: size for role, size in found.items() if role != "half" or size != found["below"]}
