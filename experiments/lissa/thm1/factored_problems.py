"""Problems whose Gauss-Newton matrix is dense, G = mean of L_i L_iᵀ, and their batches, for lissa-thm1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from curvlab.problem import ModelFunction
from experiments.lissa.second_moments import spectrum
from experiments.lissa.trials import Trials, blocks, lissa_iterates

BLOCK_TRIALS = 64


@dataclass(frozen=True)
class FactoredProblem:
    """G = 1/N Σ L_i L_iᵀ and a right-hand side.

    Attributes:
        name: label in tables and figures.
        factors: (N, P, r) L_i, float64.
        gradient: (P,) g.
    """

    name: str
    factors: Tensor
    gradient: Tensor

    @cached_property
    def flat(self) -> Tensor:
        """All factors side by side, (P, N r)."""
        return self.factors.permute(1, 0, 2).flatten(1).contiguous()

    @cached_property
    def dense(self) -> Tensor:
        """G, (P, P)."""
        return self.flat @ self.flat.T / len(self.factors)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (P,), increasing, not below zero, and eigenvectors (P, P) of G."""
        values, vectors = torch.linalg.eigh(self.dense)
        return values.clamp(min=0), vectors

    @property
    def largest(self) -> float:
        """λmax of G."""
        return float(self.eigen[0][-1])

    @property
    def trace(self) -> float:
        """The trace of G."""
        return float(self.eigen[0].sum())

    @cached_property
    def sampling_gap(self) -> Tensor:
        """E G_i² - G², (P, P): |B| times E G_t² - G² for batches drawn with replacement."""
        return self.gap(torch.eye(len(self.gradient), dtype=self.dense.dtype))

    @property
    def weights(self) -> Tensor:
        """1 / (N q_i) for examples that are drawn with probability q_i, (N,): 1, for batches are uniform."""
        return torch.ones(len(self.factors), dtype=self.factors.dtype)

    def gap(self, matrix: Tensor) -> Tensor:
        """Return E (H - G) M (H - G) for one draw H = G_i / (N q_i), (P, P) -> (P, P). Cost: 2 P² N r.

        1/N Σ G_i M G_i / (N q_i) - G M G.
        """
        size, _, rank = self.factors.shape
        product = (matrix @ self.flat).unflatten(1, (size, rank)).transpose(0, 1)
        inner = self.weights[:, None, None] * (self.factors.mT @ product)  # (N, r, r)
        outer = (self.factors @ inner).transpose(0, 1).flatten(1)
        return outer @ self.flat.T / size - self.dense @ matrix @ self.dense

    def solution(self, damping: float) -> Tensor:
        """Return u* = (G + damping)⁻¹ g, (P,)."""
        values, vectors = self.eigen
        return vectors @ ((vectors.T @ self.gradient) / (values + damping))


@dataclass(frozen=True)
class ImportanceProblem(FactoredProblem):
    """The same G, of which example i is drawn with q_i = tr(G_i) / Σ tr, and weighted by 1 / (N q_i)."""

    @cached_property
    def weights(self) -> Tensor:
        """1 / (N q_i), (N,); 0 where G_i is 0, which is never drawn."""
        traces = self.factors.square().sum((1, 2))
        return (traces.mean() / traces).where(traces > 0, 0.0)


class TrialOperator(Trials):
    """G of a problem; batches are drawn with replacement."""

    def __init__(self, problem: FactoredProblem, num_trials: int) -> None:
        super().__init__(len(problem.gradient), num_trials, problem.flat)
        self.problem = problem

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V."""
        return self.problem.dense @ vectors

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Return the weight w of every example in each batch, (N, trials)."""
        size = len(self.problem.factors)
        drawn = torch.randint(size, (batch_size, self.num_trials), generator=generator)
        counts = torch.zeros(size, self.num_trials, dtype=self.dtype)
        counts.scatter_add_(0, drawn, torch.ones_like(drawn, dtype=self.dtype))
        return counts / batch_size

    def product(self, drawn: Tensor, vectors: Tensor) -> Tensor:
        """Return Σ_i w_ik L_i L_iᵀ v_k. Cost: 2 P N r for each column, whatever the batch size."""
        size, _, rank = self.problem.factors.shape
        projections = (self.problem.flat.T @ vectors).unflatten(0, (size, rank)) * drawn[:, None]
        return self.problem.flat @ projections.flatten(0, 1)


def lissa_errors(
    problem: FactoredProblem, num_trials: int, *, damping: float, shown: list[int], **settings: Any
) -> Tensor:
    """Return u_t - u* of `Lissa` from u_0 = 0 at the steps `shown`, (shown, P, trials)."""
    found = [
        lissa_iterates(
            TrialOperator(problem, count),
            problem.gradient,
            damping=damping,
            num_steps=shown[-1],
            shown=shown,
            **settings,
        )
        for count in blocks(num_trials, BLOCK_TRIALS)
    ]
    return torch.cat(found, dim=2) - problem.solution(damping)[:, None]


# ------------------------------------------------------------------------------------------ problems
def signs_problem(name: str, size: int, num_examples: int, generator: torch.Generator) -> FactoredProblem:
    """The task of App. B.4 with finitely many examples: x_i = ±sqrt(λ_i), ‖x‖² = Σλ; g is one example's gradient.

    `name`: see `spectrum`, or "tail": one eigenvalue of 1, the others 0.02.
    """
    if name == "tail":
        eigenvalues = torch.full((size,), 0.02, dtype=torch.float64)
        eigenvalues[0] = 1
    else:
        eigenvalues = spectrum(name, size)
    signs = 2.0 * torch.randint(0, 2, (num_examples, size), generator=generator) - 1
    features = signs.double() * eigenvalues.sqrt()
    return FactoredProblem(f"signs, {name}, {size}", features[:, :, None], features[0])


def network_problem(name: str, model: nn.Module, inputs: Tensor, gradient: Tensor) -> FactoredProblem:
    """A classifier with softmax cross-entropy: L_i = J_iᵀ (diag(sqrt p) - p sqrt(p)ᵀ), L_i L_iᵀ = J_iᵀ S_i J_i.

    Args:
        name: label.
        model: in float64 and eval mode.
        inputs: (N, ...) examples that G is the mean over.
        gradient: (P,) g.
    """
    function = ModelFunction(model)

    def logits(values: list[Tensor], example: Tensor) -> Tensor:
        return function(values, example[None])[0]

    parameters = [parameter.detach() for parameter in function.parameters]
    jacobians = vmap(jacrev(logits), in_dims=(None, 0))(parameters, inputs)
    jacobian = torch.cat([piece.flatten(2) for piece in jacobians], dim=2).detach()  # (N, C, P)
    probabilities = model(inputs).detach().softmax(1)
    roots = probabilities.sqrt()
    halves = torch.diag_embed(roots) - probabilities[:, :, None] * roots[:, None]
    return FactoredProblem(name, jacobian.mT @ halves, gradient)


def rare_problem(num_examples: int) -> FactoredProblem:
    """One parameter; one of `num_examples` has curvature 1, the others none; u* is 1 without damping."""
    factors = torch.zeros(num_examples, 1, 1, dtype=torch.float64)
    factors[0] = 1
    return FactoredProblem(
        f"one of {num_examples}", factors, torch.full((1,), 1 / num_examples, dtype=torch.float64)
    )
