"""Lemma 1 along a training; Lemma 2 and Theorem 1 on softmax regression, whose constants have a closed form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional

from curvlab.lab import Run, unit
from curvlab.lab.data import DataSplits
from curvlab.lab.models import MLP, build_model
from curvlab.linalg import flatten
from curvlab.optim import Ginger
from curvlab.problem import stack
from curvlab.training import curvature_step, train

CHUNK = 64  # weights whose losses are computed at a time


@dataclass(frozen=True)
class SoftmaxRegression:
    """L(W) = mean over examples of -log softmax(W x)[y], W (C, F) with a column for the constant 1.

    Attributes:
        inputs: x, (N, F), the last entry 1, double precision.
        targets: (N, C), one-hot.
    """

    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, splits: DataSplits) -> SoftmaxRegression:
        """Return the regression on all training examples."""
        inputs, targets = stack(splits.train, torch.arange(len(splits.train)))  # type: ignore[arg-type]
        flat = inputs.flatten(1).double()
        return cls(
            torch.cat([flat, flat.new_ones(len(flat), 1)], 1),
            functional.one_hot(targets, splits.num_outputs).double(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(C, F)."""
        return self.targets.shape[1], self.inputs.shape[1]

    @property
    def lipschitz(self) -> float:
        """A constant L of Assumption 1: λmax(E x xᵀ) / 2, because diag(p) - ppᵀ ⪯ I/2."""
        return 0.5 * float(torch.linalg.eigvalsh(self.inputs.T @ self.inputs / len(self.inputs))[-1])

    @property
    def squared_gradient(self) -> float:
        """A constant M_g² of Assumption 2: 2 E‖x‖², because ‖p - y‖² <= 2."""
        return 2 * float(self.inputs.square().sum(1).mean())

    def value(self, weights: Tensor) -> Tensor:
        """Return L, (...,), of weights (..., C, F)."""
        log_probabilities = (self.inputs @ weights.mT).log_softmax(-1)
        return -(log_probabilities * self.targets).sum(-1).mean(-1)

    def residuals(self, weights: Tensor) -> Tensor:
        """Return p - y, (N, C); the gradient of example n is its outer product with x_n."""
        return (self.inputs @ weights.T).softmax(1) - self.targets

    def gradient(self, weights: Tensor) -> Tensor:
        """Return ∇L, (C, F)."""
        return self.residuals(weights).T @ self.inputs / len(self.inputs)


@dataclass(frozen=True)
class Path:
    """A run of Algorithm 1, one example a step, at t = 0, ..., T - 1.

    Attributes:
        losses: L(θ_t), (T + 1,).
        squared_gradients: ‖∇L(θ_t)‖², (T,).
        least_eigenvalues: λmin of the inverse that takes the step, (T,).
        rates: η_t, (T,).
        descents: a row for each checkpoint: what Lemma 2 compares.
    """

    losses: Tensor
    squared_gradients: Tensor
    least_eigenvalues: Tensor
    rates: Tensor
    descents: list[dict[str, Any]]


def follow(
    problem: SoftmaxRegression,
    *,
    lr: float,
    num_steps: int,
    checkpoints: Collection[int],
    generator: torch.Generator,
    **settings: Any,
) -> Path:
    """Minimise by Ginger with η_t = lr / (t + 1) from 0, and take Lemma 2 apart at the checkpoints.

    Lemma 2's expectation is over the example of the step, with the matrix given: it is computed exactly, over all
    examples. (Algorithm 1 updates the matrix before the step. If that is by the same example, the two are not
    independent, and E[Δ] is not -η G⁻¹∇L as the proof has it.)

    Args:
        problem: what is minimised.
        lr: η_0.
        num_steps: T.
        checkpoints: values of t.
        generator: of the examples and the labels.
        settings: of Ginger.
    """
    weights = nn.Parameter(torch.zeros(problem.shape, dtype=torch.float64))
    optimizer = Ginger([weights], lr, **settings)
    numbers, descents = [], []
    with torch.no_grad():
        for t in range(num_steps):
            rate = optimizer.param_groups[0]["lr"] = lr / (t + 1)
            n = int(torch.randint(len(problem.inputs), (), generator=generator))
            x, y = problem.inputs[n], problem.targets[n]
            probabilities = (weights @ x).softmax(0)
            drawn = torch.multinomial(probabilities, 1, generator=generator)[0]
            weights.grad = torch.outer(probabilities - functional.one_hot(drawn, len(y)), x)
            optimizer.update_curvature()
            ((sigma, _),) = optimizer.eigendecompositions()
            square = float(problem.gradient(weights).square().sum())
            least = 1 / (settings["damping"] + float(sigma[0]))
            numbers.append([float(problem.value(weights)), square, least, rate])
            if t in checkpoints:
                descents.append({"t": t} | lemma_2(problem, weights, optimizer))
            weights.grad = torch.outer(probabilities - y, x)
            optimizer.step()
        last = problem.value(weights)
    losses, squares, smallest, rates = torch.tensor(numbers, dtype=torch.float64).T
    return Path(torch.cat([losses, last[None]]), squares, smallest, rates, descents)


def lemma_2(problem: SoftmaxRegression, weights: Tensor, optimizer: Ginger) -> dict[str, float]:
    """Return both sides of Lemma 2 at the weights, for the optimizer's matrix and learning rate. Cost: N² C F.

    Keys: `left`, η λmin ‖∇L‖²; `decrease`, E[L(θ_t) - L(θ_{t+1})]; `noise`, L/2 η² (M_g/γ)²; `moved`, L/2 η²
    E‖G⁻¹∇ℓ‖², which the proof bounds by `noise`; `ratio`, left / (decrease + noise), at most 1 says the lemma.
    """
    settings = optimizer.param_groups[0]
    damping, lr = settings["damping"], settings["lr"]
    ((sigma, basis),) = optimizer.eigendecompositions()
    gradients = problem.residuals(weights)[:, :, None] * problem.inputs[:, None, :]
    flat = gradients.flatten(1)
    steps = flat / damping - ((flat @ basis) * (sigma / (damping * (damping + sigma)))) @ basis.T
    moved = torch.cat([problem.value(weights - lr * some.view(-1, *problem.shape)) for some in steps.split(CHUNK)])
    left = lr / (damping + float(sigma[0])) * float(problem.gradient(weights).square().sum())
    decrease = float(problem.value(weights) - moved.mean())
    factor = problem.lipschitz / 2 * lr**2
    noise = factor * problem.squared_gradient / damping**2
    return {
        "left": left,
        "decrease": decrease,
        "noise": noise,
        "moved": factor * float(steps.square().sum(1).mean()),
        "ratio": left / (decrease + noise),
    }


@unit("ginger/convergence", version=2, about="softmax regression, γ = {damping:g}, seed {repeat}")
def followed(
    run: Run, problem: SoftmaxRegression, theory: DictConfig, /, *, damping: float, repeat: int, **_: Any
) -> dict[str, Any]:
    """Return rows of `descent` (Lemma 2) and of `convergence` (Theorem 1) along one path."""
    path = follow(
        problem,
        lr=theory.lr * damping,
        num_steps=theory.num_steps[-1],
        checkpoints=list(theory.checkpoints),
        generator=run.generator("softmax regression", repeat),
        rank=theory.rank,
        decay=theory.decay,
        damping=damping,
    )
    rows = theorem_1(problem, path, damping, list(theory.num_steps))
    return {"descent": path.descents, "convergence": rows}


def theorem_1(
    problem: SoftmaxRegression, path: Path, damping: float, num_steps: Sequence[int]
) -> list[dict[str, float]]:
    """Return a row for each T: inf over t < T of ‖∇L‖² and of λmin ‖∇L‖², and the bound of Eq. 27 on it."""
    rows = []
    for T in num_steps:
        total, squares = float(path.rates[:T].sum()), float(path.rates[:T].square().sum())
        noise = problem.lipschitz / 2 * problem.squared_gradient / damping**2 * squares
        scaled = path.least_eigenvalues[:T] * path.squared_gradients[:T]
        rows.append(
            {
                "T": T,
                "squared_gradient": float(path.squared_gradients[:T].min()),
                "scaled": float(scaled.min()),
                "bound": (float(path.losses[0] - path.losses[T]) + noise) / total,
                "loss": float(path.losses[T]),
            }
        )
    return rows


# ---------------------------------------------------- Lemma 1
def eigenvalue_bounds(run: Run, splits: DataSplits, settings: Any) -> dict[str, Any]:
    """Train a small network by Ginger, and return `rows`, one for each checkpoint (a number of updates).

    Columns: updates; sigma, the largest eigenvalue of U diag(σ) Uᵀ; sigma_bound, (1 - αᵗ) max ‖d‖², which bounds
    that of any moving average; smallest and largest, eigenvalues of G⁻¹ as it is applied (a product for each
    parameter), and largest_by_damping, the same times γ, which Lemma 1 says is 1; gram_error, the largest entry
    of UᵀU - I.

    Args:
        run: seeds and device.
        splits: a classification.
        settings: `hidden_sizes`, `num_updates`, `checkpoints`, `batch_size`, and `ginger`, its settings.
    """
    model = build_model(
        partial(MLP, hidden_sizes=list(settings.hidden_sizes)),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("start", "lemma 1"),
    ).to(run.device)
    optimizer = _Measured(model.parameters(), settings.checkpoints, **settings.ginger)
    train(
        model,
        nn.CrossEntropyLoss(),
        splits.train,
        num_steps=settings.num_updates,
        batch_size=settings.batch_size,
        optimizer=optimizer,
        step=curvature_step,
        generator=run.generator("batches", "lemma 1"),
    )
    return {"rows": optimizer.rows}


class _Measured(Ginger):
    """Ginger that measures itself after some of its updates."""

    def __init__(self, params: Any, checkpoints: list[int], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rows: list[dict[str, Any]] = []
        self._checkpoints = set(checkpoints)
        self._updates, self._longest = 0, 0.0

    def update_curvature(self, **settings: Any) -> None:
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        d = flatten(parameter.grad for parameter in members)
        self._longest = max(self._longest, float(d.norm()) ** 2)
        super().update_curvature(**settings)
        self._updates += 1
        if self._updates in self._checkpoints:
            self.rows.append(self._row(d))

    def _row(self, like: Tensor) -> dict[str, Any]:
        settings = self.param_groups[0]
        ((sigma, basis),) = self.eigendecompositions()
        columns = [self.inverse_product(column) for column in torch.eye(len(like)).to(like)]
        inverse = torch.stack([column.cpu() for column in columns], 1).double()
        values = torch.linalg.eigvalsh((inverse + inverse.T) / 2)
        gram = basis.T @ basis
        return {
            "damping": settings["damping"],
            "rank": settings["rank"],
            "num_parameters": len(like),
            "updates": self._updates,
            "sigma": float(sigma[0]),
            "sigma_bound": (1 - settings["decay"] ** self._updates) * self._longest,
            "smallest": float(values[0]),
            "largest": float(values[-1]),
            "largest_by_damping": float(values[-1]) * settings["damping"],
            "gram_error": float((gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max()),
        }
