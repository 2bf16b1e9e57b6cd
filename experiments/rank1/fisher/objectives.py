"""Objectives for the Fisher lemmas: smooth outputs with known constants, and constants at given parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional

from curvlab.curvature import FisherOperator
from curvlab.problem.known_losses import output_loss
from experiments.rank1.objectives import Objective, neural_network

LOSSES: dict[str, type[nn.Module]] = {"least squares": nn.MSELoss, "softmax": nn.CrossEntropyLoss}


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

    @property
    def smoothness(self) -> float:
        """L for inputs of norm at most 1."""
        return self.activation.second * self.scale


@dataclass(frozen=True)
class FisherObjective(Objective):
    """The mean loss of a model on data, with F and the constants of the lemmas beside the exact Hessian.

    Attributes:
        model: fp64, in eval mode.
        loss: mean over examples.
        data: inputs and targets.
        smoothness: L for all parameters; None: only at given parameters, see `gap`.
    """

    model: nn.Module
    loss: nn.Module
    data: tuple[Tensor, Tensor]
    smoothness: float | None

    @property
    def fisher(self) -> FisherOperator:
        """F at the current parameters."""
        return FisherOperator(self.model, self.loss, self.data)


def fisher_objective(
    model: nn.Module,
    kind: str,
    data: tuple[Tensor, Tensor],
    *,
    name: str,
    smoothness: float | None = None,
    hessian_lipschitz: float | None = None,
    optimum: float = 0.0,
) -> FisherObjective:
    """Return a model's mean loss on data, of one of the `LOSSES`; `hessian_lipschitz` is M, `optimum` f*."""
    loss = LOSSES[kind]()
    parts = vars(neural_network(model, data, loss, name=name))
    known = {"hessian_lipschitz": hessian_lipschitz, "optimum": optimum, "smoothness": smoothness}
    return FisherObjective(**{**parts, "model": model, "loss": loss, "data": data, **known})


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


def gap(objective: FisherObjective, *, max_entries: int = 2_000_000) -> dict[str, float]:
    """Return ‖∇²f - F‖ at the current parameters and every bound on it, from dense matrices.

    Keys: gap (spectral norm), loss, smoothness (L here: largest spectral norm of any output's Hessian, example by
    example), one_norm (mean over examples of the 1-norm of the loss's gradient by the outputs). All are in the
    scale of the mean loss. Cost: outputs times examples dense (n, n) matrices, of `max_entries` numbers at a
    time.
    """
    inputs, targets = objective.data
    names = [name for name, _ in objective.model.named_parameters()]
    shapes = [parameter.shape for _, parameter in objective.model.named_parameters()]
    vector = torch.cat([p.detach().reshape(-1) for p in objective.model.parameters()])

    def outputs(values: Tensor, batch: Tensor) -> Tensor:
        pieces = values.split([shape.numel() for shape in shapes])
        named = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        return functional_call(objective.model, named, (batch,))

    size, count = len(vector), len(inputs)
    chunk = max(1, max_entries // (outputs(vector, inputs[:1]).numel() * size**2))
    difference, largest, one_norm, total = torch.zeros(size, size, dtype=vector.dtype), 0.0, 0.0, 0.0
    closed_form = output_loss(objective.loss)
    for start in range(0, count, chunk):
        batch, labels = inputs[start : start + chunk], targets[start : start + chunk]
        current = outputs(vector, batch)
        slopes = closed_form.gradient(current, labels)
        hessians = hessian(outputs)(vector, batch)
        # ∇²f - F = Σ_n Σ_j ∂ℓ_n/∂φ_j ∇²φ_j: the loss's own curvature is the same in both.
        difference += torch.einsum("bc,bcij->ij", slopes, hessians)
        largest = max(largest, float(torch.linalg.eigvalsh(hessians).abs().max()))
        one_norm += float(slopes.abs().sum())
        total += float(closed_form.per_example(current, labels).sum())
    divisor = closed_form.count(targets)
    return {
        "gap": float(torch.linalg.matrix_norm(difference / divisor, 2)),
        "loss": total / divisor,
        "smoothness": largest,
        "one_norm": one_norm / divisor,
    }


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


def parabola(kind: str, *, curvature: float) -> FisherObjective:
    """Return where the printed bounds fail: least squares with residual 1, softmax with p = 1/2."""
    ones = torch.ones(1, 1, dtype=torch.float64)
    softmax = kind == "softmax"
    targets = torch.zeros(1, dtype=torch.long) if softmax else ones
    model = Parabola(curvature, 2 if softmax else 1)
    return fisher_objective(model, kind, (ones, targets), name=f"parabola, {kind}", smoothness=curvature)


def convex_parabola(*, curvature: float, start: float) -> FisherObjective:
    """Return softmax on the same outputs with the other label, f = log(1 + exp(κ x²/2)): convex, f* = log 2 at 0.

    With σ = 2 f, as printed, α(0) = 2 log 2 is below κ/4 for κ > 5.5. The curvature there is κ/2, and F = 0 adds
    nothing: steps from near 0 overshoot by more than they correct, and the method cannot arrive. M = 0.666
    κ^(3/2).
    """
    return fisher_objective(
        Parabola(curvature, 2, start=start),
        "softmax",
        (torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.long)),
        name=f"parabola, softmax, κ = {curvature:g}",
        smoothness=curvature,
        hessian_lipschitz=PARABOLA_THIRD * curvature**1.5,
        optimum=math.log(2),
    )


def perceptron(
    kind: str, *, scale: float, activation: str, noise: float, generator: torch.Generator
) -> FisherObjective:
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
    return fisher_objective(
        model,
        kind,
        (inputs, targets),
        name=f"{kind}, scale {scale:g}",
        smoothness=model.smoothness,
        hessian_lipschitz=perceptron_lipschitz(model, LOSSES[kind](), targets),
    )
