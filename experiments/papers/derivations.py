"""Printed equations that are false by arithmetic, each beside what it should be: computed, never typed.

A claim of a target is measured on networks; these need none. Each check returns one number for the equation as it
is printed and for the mended one, which has the value `holds`. `make report` shows them in results/MISPRINTS.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from curvlab.lab import load_paper_numbers
from experiments.papers import FOLDER


@dataclass(frozen=True)
class Derivation:
    """A printed statement with its check.

    Args:
        paper: its key.
        place: where it stands.
        printed: what it says.
        should_be: what holds.
        shows: the counter-example in words, with {} for the number.
        holds: the number of an equation that is right.
        check: (mended) -> the number.
    """

    paper: str
    place: str
    printed: str
    should_be: str
    shows: str
    holds: float
    check: Callable[[bool], float]


# ------------------------------------------------------------------------------------ pbrf
# Logits of 6 examples in 3 classes, linear in 5 parameters: J (18, 5), H_y (18, 18), both dense.
_LOGITS = torch.tensor([[0.3, -0.2, 0.1], [1.0, 0.4, -0.5], [0.0, 0.2, -0.1]], dtype=torch.float64).repeat(2, 1)
_JACOBIAN = torch.cos(torch.arange(90, dtype=torch.float64)).reshape(18, 5)
_GRADIENT = torch.sin(1 + torch.arange(5, dtype=torch.float64))
_DAMPING = 0.01


def _loss(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 3), torch.tensor([0, 1, 2, 2, 1, 0]))


@cache
def _gauss_newton() -> Tensor:
    return _JACOBIAN.T @ hessian(_loss, _LOGITS.flatten()) @ _JACOBIAN


def _quadratic_loss(mended: bool) -> float:
    """Return the second-order term of Eq. 39 over what the loss has of second order."""
    start, step = _LOGITS.flatten(), 1e-3 * torch.cos(2 * torch.arange(18, dtype=torch.float64))
    slope = jacobian(_loss, start)
    left = _loss(start + step) - _loss(start) - slope @ step
    term = step @ hessian(_loss, start) @ step
    return float((0.5 if mended else 1.0) * term / left)


def _linear_response(mended: bool) -> float:
    """Return how far the minimum with Eq. 44's quadratic form is from Eq. 46, relative."""
    matrix = _gauss_newton()

    def objective(weights: Tensor) -> Tensor:
        quadratic = weights @ matrix @ weights
        return (0.5 if mended else 1.0) * quadratic + 0.5 * _DAMPING * weights @ weights

    found = torch.linalg.solve(hessian(objective, torch.zeros(5, dtype=torch.float64)), _GRADIENT)
    stated = torch.linalg.solve(matrix + _DAMPING * torch.eye(5, dtype=torch.float64), _GRADIENT)
    return float((found - stated).norm() / stated.norm())


def _proximity(mended: bool) -> float:
    """Return the length of the response to a weight of 1e-6, over that of Eq. 46, by proximal gradient descent."""
    matrix, weight = _gauss_newton(), 1e-6
    step = 1 / float(torch.linalg.eigvalsh(matrix)[-1] + _DAMPING)
    moved = torch.zeros(5, dtype=torch.float64)
    for _ in range(3_000):
        moved = moved - step * (matrix @ moved - weight * _GRADIENT)
        if mended:
            moved = moved / (1 + step * _DAMPING)
        else:
            length = moved.norm()
            moved = moved * torch.clamp(1 - step * _DAMPING / 2 / length.clamp(min=1e-300), min=0)
    stated = torch.linalg.solve(matrix + _DAMPING * torch.eye(5, dtype=torch.float64), _GRADIENT)
    return float(moved.norm() / weight / stated.norm())


def _rows_beside_the_caption(mended: bool) -> float:
    """Return how many of Table 8's printed rows are of data that its caption does not name."""
    named = {"MNIST", "FashionMNIST", "Concrete", "Energy"} if mended else {"MNIST"}
    printed = load_paper_numbers("pbrf", folder=FOLDER).in_table("Table 8")
    return float(len({number.row for number in printed} - named))


# ------------------------------------------------------------------------------------ ngd
def _inverse_temperature(mended: bool) -> float:
    """Return n E[L] over λ log n for L = w²/2, where λ = 1/2, n = 10,000, by quadrature."""
    n = 10_000
    beta = 1 / math.log(n) if mended else math.log(n)
    weights = np.linspace(-12, 12, 200_001) / math.sqrt(beta * n)
    density = np.exp(-beta * n * weights**2 / 2)
    return float(n * (weights**2 / 2 * density).sum() / density.sum() / (0.5 * math.log(n)))


def _localization(mended: bool) -> float:
    """Return the variance that Eq. 21 samples where the loss is flat over that of Eq. 20's density, γ = 100."""
    localization, step = 100.0, 1e-6
    kept = 1 - step / 2 * localization  # w <- kept w + N(0, step)
    return float(step / (1 - kept**2) * (1 if mended else 2) * localization)


def _sum_over_a_batch(mended: bool) -> float:
    """Return the mean drift of Eq. 21 over all batches of 128 over nβ times the gradient of the mean loss."""
    gradients = np.cos(np.arange(1280.0)) + 1
    batches = gradients.reshape(10, 128)
    drift = batches.mean(1) if mended else batches.sum(1)
    return float(drift.mean() / gradients.mean())


def _t_value(mended: bool) -> float:
    """Return the p-value of the printed number, read as a t-value over 10 + 10 seeds and as itself."""
    return 1.9e-31 if mended else float(2 * stats.t.sf(1.9**-31, df=18))


DERIVATIONS = (
    Derivation(
        "pbrf", "App. B.3, Eq. 30", "The proximity term is λ/2 ‖θ − θ_s‖.", "λ/2 ‖θ − θ_s‖²",
        "the response to a small weight is {} times Eq. 46's, on a dense problem", 1.0, _proximity,
    ),
    Derivation(
        "pbrf", "App. B.4, Eq. 39", "The quadratic term of the loss is dᵀ ∇²L d.", "½ dᵀ ∇²L d",
        "it is {} times the loss's second order, for cross-entropy", 1.0, _quadratic_loss,
    ),
    Derivation(
        "pbrf", "App. B.4, Eq. 44", "The Bregman divergence of linear outputs is dᵀ Jᵀ H J d.", "½ dᵀ Jᵀ H J d",
        "its minimum misses Eq. 46 by {:%} of its length, on a dense problem", 0.0, _linear_response,
    ),
    Derivation(
        "pbrf", "App. D.2, Table 8, caption", "The table is on the MNIST dataset.",
        "on four data sets, MNIST among them",
        "{} of its rows are of other data", 0.0, _rows_beside_the_caption,
    ),
    Derivation(
        "ngd", "Sec. 2.2", "The inverse temperature β is set to log n.", "β = 1/log n",
        "the WBIC has {:%} of its term λ log n, for L = w²/2 and 10,000 examples", 1.0, _inverse_temperature,
    ),
    Derivation(
        "ngd", "Sec. 2.2, Eq. 20", "The density has exp(−γ ‖w − w*‖²).",
        "exp(−γ/2 ‖w − w*‖²), which Eq. 21 samples",
        "Eq. 21 samples {} times its variance", 1.0, _localization,
    ),
    Derivation(
        "ngd", "Sec. 2.2, Eq. 21", "The drift is βn times the sum of a batch's gradients.", "βn/m times that sum",
        "the drift is {} times too long for batches of that many examples", 1.0, _sum_over_a_batch,
    ),
    Derivation(
        "ngd", "Fig. 1", "The highest t-value is 1.9⁻³¹.", "a p-value, of 1.9e-31",
        "that t-value has a p-value of {}: no difference", 1.9e-31, _t_value,
    ),
)  # fmt: skip
