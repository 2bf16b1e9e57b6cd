"""The functions that the rank-one slides minimise, with the constants that their lemmas ask for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.curvature import HessianOperator
from curvlab.lab.data import DataSplits
from curvlab.linalg import DenseOperator, LinearOperator
from curvlab.optim import CubicNewton
from curvlab.training import minimize

# Largest |third derivative| of log(1 + exp(z)).
LOGISTIC_THIRD = 1 / (6 * math.sqrt(3))


@dataclass(frozen=True)
class Objective:
    """A function of `parameters`, fp64, at their current values.

    Attributes:
        name: label in tables and figures.
        parameters: x.
        value: f(x), differentiable.
        hessian: ∇²f(x).
        optimum: f*, or a lower bound of it.
        spectral_norm: λ >= ‖∇²f(x)‖ for all x; None: not known.
        hessian_lipschitz: M; None: not known.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    value: Callable[[], Tensor]
    hessian: LinearOperator
    optimum: float
    spectral_norm: float | None
    hessian_lipschitz: float | None

    @property
    def size(self) -> int:
        """Number of parameters, n."""
        return self.hessian.shape[0]

    def closure(self) -> Tensor:
        """Return f(x) with its gradient left in the parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        value = self.value()
        value.backward()
        return value

    def point(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def move_to(self, point: Sequence[Tensor]) -> None:
        """Set the parameters to `point`."""
        for parameter, value in zip(self.parameters, point, strict=True):
            parameter.data.copy_(value)


class CoordinatewiseHessian(LinearOperator):
    """diag(c(x)) of a sum of functions of one coordinate each."""

    def __init__(self, x: nn.Parameter, second_derivative: Callable[[Tensor], Tensor]) -> None:
        super().__init__(len(x), dtype=x.dtype, device=x.device)
        self.x, self.second_derivative = x, second_derivative

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return diag(c(x)) V."""
        return self.second_derivative(self.x.detach())[:, None] * vectors


class LogisticHessian(LinearOperator):
    """1/N Aᵀ diag(s (1 - s)) A + l2 I in closed form: a fifth of the time of automatic differentiation.

    A: (N, n). Cost of a product: two passes over A.
    """

    def __init__(self, features: Tensor, weight: nn.Parameter, l2: float) -> None:
        super().__init__(features.shape[1], dtype=features.dtype, device=features.device)
        self.features, self.weight, self.l2 = features, weight, l2

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return H V."""
        probabilities = torch.sigmoid(self.features @ self.weight.detach())
        scale = probabilities * (1 - probabilities) / len(self.features)
        return self.features.T @ (scale[:, None] * (self.features @ vectors)) + self.l2 * vectors

    @property
    def is_psd(self) -> bool:
        """True."""
        return True


def square_root_curve(start: float) -> Objective:
    """f(x) = sqrt(1 + x²): convex, f'' > 0, and Newton's method diverges from |x| > 1 (x <- -x³).

    λ = f''(0) = 1; M = max |f'''| = 3/2 (5/4)^(-5/2), at x = 1/2.
    """
    x = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    return Objective(
        name="sqrt(1 + x²)",
        parameters=[x],
        value=lambda: (1 + x.square()).sqrt().sum(),
        hessian=CoordinatewiseHessian(x, lambda t: (1 + t.square()) ** -1.5),
        optimum=1.0,
        spectral_norm=1.0,
        hessian_lipschitz=1.5 * 1.25**-2.5,
    )


def cosines(size: int, start: float) -> Objective:
    """f(x) = Σ (1 - cos x_i): not convex, H = diag(cos x_i), so λ = M = 1. All coordinates start at `start`."""
    x = nn.Parameter(torch.full((size,), start, dtype=torch.float64))
    return Objective(
        name=f"cosines, n = {size}",
        parameters=[x],
        value=lambda: size - x.cos().sum(),
        hessian=CoordinatewiseHessian(x, torch.cos),
        optimum=0.0,
        spectral_norm=1.0,
        hessian_lipschitz=1.0,
    )


def trapping_curve(start: float) -> Objective:
    """An even function with f'' piecewise linear, not convex, on which the lemma's method never arrives.

    f'' is 2√2 - 2/3 at 0, falls with slope -1 to -2/3 at |x| = 2√2, stays there to 3.5, rises with slope 1 to 4/3
    at 5.5 and stays there: M = 1, λ = 2√2 - 2/3, and 0 is the minimum. At 3, f' = 2 and f'' = -2/3, so that α =
    sqrt(M f'/2) = 1 and x <- 3 - 2/(1 - 2/3) = -3: from anywhere near, the method ends in this cycle, although
    D = f'' exactly, σ = 0 and D + α > 0. The proof needs D >= 0.
    """
    peak, flat, high = 2 * math.sqrt(2), 3.5, 5.5
    x = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def value() -> Tensor:
        size = x.abs()
        ramps = (peak - size).clamp(min=0) ** 3 + (size - flat).clamp(min=0) ** 3 - (size - high).clamp(min=0) ** 3
        return (ramps / 6 - peak**3 / 6 + peak**2 / 2 * size - size.square() / 3).sum()

    def second_derivative(t: Tensor) -> Tensor:
        size = t.abs()
        ramps = (peak - size).clamp(min=0) + (size - flat).clamp(min=0) - (size - high).clamp(min=0)
        return ramps - 2 / 3

    return Objective(
        name="trapping curve",
        parameters=[x],
        value=value,
        hessian=CoordinatewiseHessian(x, second_derivative),
        optimum=0.0,
        spectral_norm=peak - 2 / 3,
        hessian_lipschitz=1.0,
    )


def scaled(objective: Objective, factor: float) -> Objective:
    """Return factor · f: the method takes the same steps on it."""
    return dataclasses.replace(
        objective,
        name=f"{factor:g} · {objective.name}",
        value=lambda: factor * objective.value(),
        hessian=factor * objective.hessian,
        optimum=factor * objective.optimum,
        spectral_norm=None if objective.spectral_norm is None else factor * objective.spectral_norm,
        hessian_lipschitz=None if objective.hessian_lipschitz is None else factor * objective.hessian_lipschitz,
    )


def spectrum(name: str, size: int) -> Tensor:
    """Return eigenvalues with spectral norm 1: isotropic, power (1/k), exponential, spike, and two indefinite.

    signed: -1, 0.05, -1/3, 0.025, ..., whose largest eigenvalue says nothing of its norm; mirrored: -1, 1, ...
    """
    k = torch.arange(1, size + 1, dtype=torch.float64)
    found = {
        "isotropic": torch.ones_like(k),
        "power": 1 / k,
        "exponential": 10 ** (-4 * (k - 1) / max(size - 1, 1)),
        "signed": torch.where(k % 2 == 1, -1 / k, 0.1 / k),
        "mirrored": (-1) ** k,
        "spike": torch.where(k == 1, 1.0, 1e-3).double(),
    }
    if name not in found:
        raise ValueError(f"unknown spectrum {name!r}: choose {', '.join(found)}")
    return found[name]


def rotated(eigenvalues: Tensor, generator: torch.Generator) -> Tensor:
    """Return a symmetric matrix with these eigenvalues in a random basis, (n, n)."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    matrix = basis @ (eigenvalues[:, None] * basis.T)
    return (matrix + matrix.T) / 2


def quadratic(name: str, size: int, generator: torch.Generator) -> Objective:
    """½ xᵀHx with one of the spectra above (none negative), from a random point of norm 1; M = 0."""
    matrix = rotated(spectrum(name, size), generator)
    start = torch.randn(size, dtype=torch.float64, generator=generator)
    x = nn.Parameter(start / start.norm())
    return Objective(
        name=f"quadratic, {name}, n = {size}",
        parameters=[x],
        value=lambda: 0.5 * x @ matrix @ x,
        hessian=DenseOperator(matrix, is_psd=True),
        optimum=0.0,
        spectral_norm=1.0,
        hessian_lipschitz=0.0,
    )


def logistic_regression(splits: DataSplits, *, l2: float) -> Objective:
    """Mean logistic loss + l2/2 ‖x‖² on all examples, training and test, from x = 0.

    λ = λmax(AᵀA/N)/4 + l2, M = max |s''| max‖a‖ λmax(AᵀA/N); f* by Newton's method.
    """
    parts = [part.tensors for part in (splits.train, splits.test)]  # type: ignore[attr-defined]  # TensorDatasets
    features, targets = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
    targets = targets[:, 0]
    weight = nn.Parameter(torch.zeros(features.shape[1], dtype=torch.float64))

    def value() -> Tensor:
        losses = functional.binary_cross_entropy_with_logits(features @ weight, targets)
        return losses + 0.5 * l2 * weight @ weight

    largest = float(torch.linalg.eigvalsh(features.T @ features / len(features))[-1])
    objective = Objective(
        name=f"logistic, {splits.name}, n = {len(weight)}",
        parameters=[weight],
        value=value,
        hessian=LogisticHessian(features, weight, l2),
        optimum=math.nan,
        spectral_norm=largest / 4 + l2,
        hessian_lipschitz=LOGISTIC_THIRD * largest * float(features.norm(dim=1).max()),
    )
    return with_measured_optimum(objective)


def with_measured_optimum(objective: Objective, *, gradient_norm: float = 1e-12) -> Objective:
    """Return a convex objective with f* by Newton's method, cubic where that fails; x goes back to its start."""
    start, best = objective.point(), math.inf
    for lipschitz, num_steps in ((0.0, 30), (objective.hessian_lipschitz or 0.0, 1000)):
        optimizer = CubicNewton(objective.parameters, objective.hessian, hessian_lipschitz=lipschitz)
        found = minimize(
            objective.closure, objective.parameters, optimizer, gradient_norm=gradient_norm, max_steps=num_steps
        )
        best = min(best, found.value)
        objective.move_to(start)
        if found.converged:
            break
    return dataclasses.replace(objective, optimum=best)


def neural_network(model: nn.Module, data: tuple[Tensor, Tensor], loss: nn.Module, *, name: str) -> Objective:
    """A network's mean loss on a pair of tensors, all fp64; f* >= 0, λ and M not known."""
    inputs, targets = data
    parameters = list(model.parameters())
    return Objective(
        name=f"{name}, n = {sum(parameter.numel() for parameter in parameters)}",
        parameters=parameters,
        value=lambda: loss(model(inputs), targets),
        hessian=HessianOperator(model, loss, data),
        optimum=0.0,
        spectral_norm=None,
        hessian_lipschitz=None,
    )
