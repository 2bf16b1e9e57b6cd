"""The functions that the rank-one slides minimise, with the constants that their lemmas ask for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.curvature import FisherOperator, HessianOperator
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


# ------------------------------------------------------------------------------------ networks
@dataclass(frozen=True)
class NetworkObjective(Objective):
    """The mean loss of a model on data, with F and the constants of its lemmas beside the exact Hessian.

    Attributes:
        model: fp64, in eval mode.
        loss: mean over examples.
        data: inputs and targets.
        smoothness: L >= ‖∇²φ_j(x)‖ of every output for all parameters; None: not known.
    """

    model: nn.Module
    loss: nn.Module
    data: tuple[Tensor, Tensor]
    smoothness: float | None

    @property
    def fisher(self) -> FisherOperator:
        """F at the current parameters."""
        return FisherOperator(self.model, self.loss, self.data)


def neural_network(
    model: nn.Module, data: tuple[Tensor, Tensor], loss: nn.Module, *, name: str, **known: float
) -> NetworkObjective:
    """Return a network's mean loss on a pair of tensors, all fp64; of λ, M, L and f* what is given is known."""
    (inputs, targets), parameters = data, list(model.parameters())
    return NetworkObjective(
        name=f"{name}, n = {sum(parameter.numel() for parameter in parameters)}",
        parameters=parameters,
        value=lambda: loss(model(inputs), targets),
        hessian=HessianOperator(model, loss, data),
        optimum=known.get("optimum", 0.0),
        spectral_norm=None,
        hessian_lipschitz=known.get("hessian_lipschitz"),
        model=model,
        loss=loss,
        data=data,
        smoothness=known.get("smoothness"),
    )


@dataclass(frozen=True)
class Activation:
    """g with |g'| <= 1, and bounds on what else the constants ask for.

    Attributes:
        function: g.
        second: max |g''|.
        third: max |g'''|.
        third_by_value: max |g g'''|: the bound on |g'''| alone would not do where g is unbounded.
    """

    function: Callable[[Tensor], Tensor]
    second: float
    third: float
    third_by_value: float


LOSSES: dict[str, type[nn.Module]] = {"least squares": nn.MSELoss, "softmax": nn.CrossEntropyLoss}
ACTIVATIONS = {
    "identity": Activation(lambda t: t, 0.0, 0.0, 0.0),
    "tanh": Activation(torch.tanh, 4 / (3 * math.sqrt(3)), 2.0, 2.0),
    "softplus": Activation(functional.softplus, 1 / 4, 1 / (6 * math.sqrt(3)), 0.171),
}
PARABOLA_THIRD = 0.666  # max of |third derivative| of log(1 + exp(y²/2))


class Perceptron(nn.Module):
    """φ_j(a) = ± scale · g(w_j · a): its outputs are smooth for all weights.

    Spectral norms by the weights, for ‖a‖ <= 1: gradient of φ_j <= scale, Hessian <= scale max |g''| = L.
    The sign is + but for the first of several softplus outputs: then softmax with label 0 is convex,
    log(1 + Σ_j exp(φ_j - φ_0)) with convex φ_j - φ_0.
    """

    signs: Tensor

    def __init__(self, inputs: int, outputs: int, *, scale: float, activation: str) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=False).double()
        self.scale, self.activation = scale, ACTIVATIONS[activation]
        signs = torch.ones(outputs, dtype=torch.float64)
        if activation == "softplus" and outputs > 1:
            signs[0] = -1.0
        self.register_buffer("signs", signs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return φ, (B, outputs)."""
        return self.scale * self.signs * self.activation.function(self.layer(inputs))


def perceptron_lipschitz(model: Perceptron, loss: nn.Module, targets: Tensor) -> float:
    """Return M, a bound on the third derivative of the mean loss, for inputs of norm at most 1.

    Of one example: ℓ'''[Jh, Jh, Jh] + 3 ℓ''[Jh, φ''[h, h]] + ℓ'[φ'''[h, h, h]], with ‖Jh‖ <= s ‖h‖.
    Squared error r²: ℓ''' = 0, ℓ'' = 2, |ℓ'| = 2 |φ - b|. Softmax: |ℓ'''| <= 2^(3/2)/(6 sqrt(3)) (a third
    central moment of a variable of range sqrt(2)), ‖ℓ''‖ <= 1/2, ‖ℓ'‖ <= sqrt(2).
    """
    scale, activation = model.scale, model.activation
    second, third = activation.second * scale, activation.third * scale
    if isinstance(loss, nn.MSELoss):
        residual_third = scale**2 * activation.third_by_value + float(targets.abs().max()) * third
        return 6 * scale * second + 2 * residual_third
    return 2**1.5 / (6 * math.sqrt(3)) * scale**3 + 1.5 * scale * second + math.sqrt(2) * third


class Parabola(nn.Module):
    """φ(x) = κ x²/2 in one parameter; for softmax beside an output that is always 0.

    At x = 0, one example with its label not yet fitted: F = 0 and ∇²f = κ ∂ℓ/∂φ, so that L = κ is paid in full.
    """

    def __init__(self, curvature: float, num_outputs: int, *, start: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), start, dtype=torch.float64))
        self.curvature, self.num_outputs = curvature, num_outputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return φ and zeros, (B, outputs); the inputs, ones, only say how many."""
        first = self.curvature / 2 * self.x.square() * inputs
        return torch.cat([first, torch.zeros_like(first)], dim=1)[:, : self.num_outputs]


def parabola(kind: str, *, curvature: float) -> NetworkObjective:
    """Return where the printed bounds fail: least squares with residual 1, softmax with p = 1/2."""
    ones, softmax = torch.ones(1, 1, dtype=torch.float64), kind == "softmax"
    targets = torch.zeros(1, dtype=torch.long) if softmax else ones
    model = Parabola(curvature, 2 if softmax else 1)
    return neural_network(model, (ones, targets), LOSSES[kind](), name=f"parabola, {kind}", smoothness=curvature)


def convex_parabola(*, curvature: float, start: float) -> NetworkObjective:
    """Return softmax on the same outputs with the other label, f = log(1 + exp(κ x²/2)): convex, f* = log 2 at 0.

    With σ = 2 f, as printed, α(0) = 2 log 2 is below κ/4 for κ > 5.5. The curvature there is κ/2, and F = 0 adds
    nothing: steps from near 0 overshoot by more than they correct, and the method cannot arrive. M = 0.666
    κ^(3/2).
    """
    return neural_network(
        Parabola(curvature, 2, start=start),
        (torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.long)),
        nn.CrossEntropyLoss(),
        name=f"parabola, softmax, κ = {curvature:g}",
        smoothness=curvature,
        hessian_lipschitz=PARABOLA_THIRD * curvature**1.5,
        optimum=math.log(2),
    )


def perceptron(
    kind: str, *, scale: float, activation: str, noise: float, generator: torch.Generator
) -> NetworkObjective:
    """Return a perceptron on 100 Gaussian inputs of norm at most 1, with targets from a random one like it.

    Least squares: one output, 5 inputs, targets with Gaussian noise of that standard deviation (0: f* = 0).
    Softmax: three outputs, labels replaced at random with probability `noise`. With softplus f is convex: targets
    are not positive (outputs are), all labels are 0.
    """
    num_outputs = 1 if kind == "least squares" else 3
    inputs = torch.randn(100, 5, dtype=torch.float64, generator=generator)
    inputs /= inputs.norm(dim=1).max()
    models = [Perceptron(5, num_outputs, scale=scale, activation=activation) for _ in range(2)]
    for model, size in zip(models, (2.0, 0.3), strict=True):
        weight = torch.randn(num_outputs, 5, dtype=torch.float64, generator=generator)
        model.layer.weight.data.copy_(size * weight)
    teacher, model = models
    outputs = teacher(inputs).detach()
    disturbance = torch.randn(outputs.shape, dtype=torch.float64, generator=generator)
    if kind == "least squares":
        targets = -noise * disturbance.abs() if activation == "softplus" else outputs + noise * disturbance
    elif activation == "softplus":
        targets = torch.zeros(100, dtype=torch.long)
    else:
        random_labels = disturbance.argmax(1)
        replaced = torch.rand(100, dtype=torch.float64, generator=generator) < noise
        targets = torch.where(replaced, random_labels, outputs.argmax(1))
    loss = LOSSES[kind]()
    return neural_network(
        model,
        (inputs, targets),
        loss,
        name=f"{kind}, scale {scale:g}",
        smoothness=model.activation.second * scale,
        hessian_lipschitz=perceptron_lipschitz(model, loss, targets),
    )
