"""Fig. 1, paired: LiSSA and SGD on the proximal Bregman objective, step by step on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.influence import ProximalBregmanObjective
from curvlab.linalg import LinearOperator
from curvlab.linalg.operator import DerivedOperator
from curvlab.solvers import Lissa, LissaHyperparameters
from curvlab.solvers.lissa import LissaState

PARTED = 0.5  # of LiSSA's length: where SGD is farther than that from LiSSA, the two have parted


@dataclass(frozen=True)
class Paired:
    """Where both iterations end, and how they go there; u = -x to first order in ε, step by step.

    Attributes:
        solutions: (P, K) LiSSA's x.
        displacement: (P, K) SGD's u = (θ - θ*) / ε.
        lissa_norms: (T, K) ‖x_t‖, inf from where it is not finite.
        sgd_norms: (T, K) ‖u_t‖, likewise.
        distances: (T, K) ‖u_t + x_t‖, likewise.
    """

    solutions: Tensor
    displacement: Tensor
    lissa_norms: Tensor
    sgd_norms: Tensor
    distances: Tensor


class AllExamples(DerivedOperator):
    """An operator whose batches are all its examples: what LiSSA is where |B| would exceed N."""

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V."""
        return self.origin.matmat(vectors)

    # Without weights: nothing is drawn.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> AllExamples:
        """Return the operator itself; nothing is drawn."""
        return self

    @property
    def is_psd(self) -> bool:
        """As the operator's."""
        return self.origin.is_psd

    @property
    def damping(self) -> float:
        """As the operator's."""
        return self.origin.damping

    @property
    def num_examples(self) -> int | None:
        """As the operator's."""
        return self.origin.num_examples


class _Follower:
    """Plain SGD that takes one step for each of LiSSA's, and measures both."""

    def __init__(  # noqa: PLR0917
        self,
        objective: ProximalBregmanObjective,
        step_size: float,
        batch_size: int | None,
        weights: Tensor | None,
        generator: torch.Generator,
        on_step: Callable[[], None],
    ) -> None:
        self.weights = weights
        self.objective, self.step_size, self.batch_size = objective, step_size, batch_size
        self.generator, self.on_step = generator, on_step
        self.displacement = objective.zeros()
        self.norms: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, state: LissaState) -> None:
        u = self.displacement
        if self.batch_size is None:
            gradient = self.objective.gradient(u)
        else:
            gradient = self.objective.sampled_gradient(
                u, batch_size=self.batch_size, weights=self.weights, generator=self.generator
            )
        self.displacement = u - self.step_size * gradient
        x = state.x.to(self.displacement)
        found = (x, self.displacement, x + self.displacement)
        self.norms.append(tuple(_norms(vectors) for vectors in found))  # type: ignore[arg-type]
        self.on_step()


def run_paired(  # noqa: PLR0917
    objective: ProximalBregmanObjective,
    damped: LinearOperator,
    gradients: Tensor,
    settings: LissaHyperparameters,
    generators: tuple[torch.Generator, torch.Generator],
    on_step: Callable[[], None] = lambda: None,
    *,
    weights: Tensor | None = None,
) -> Paired:
    """Solve (G + damping) x = g by LiSSA and minimise the objective by SGD, with one step size, |B| and T.

    With |B| >= N every step of both takes all the data, and nothing is drawn, but by weights.

    Args:
        objective: of the K points; its damping and its data are those of `damped`.
        damped: G + damping I at θ*.
        gradients: (P, K) of the points' losses at θ*.
        settings: step size η, |B| and T of both.
        generators: LiSSA's and SGD's, in the same state: each draws the same indices, once for each step.
        on_step: called after each step of both.
        weights: probabilities by which both draw examples, (N,); None: uniformly.

    Cost: for each of the T steps a product for each point and 4F of |B| examples for each point, F a forward.
    """
    full = weights is None and settings.batch_size >= objective.num_examples
    size = None if full else settings.batch_size
    follower = _Follower(objective, settings.step_size, size, weights, generators[1], on_step)
    solver = Lissa(
        settings.step_size,
        settings.batch_size,
        settings.num_steps,
        check_residual=False,  # the comparison with CG says more, and costs no products of the full data
        raise_on_divergence=False,  # as in the paper, whose third case ("large and apart") this may be
        callback=follower,
        weights=weights,
    )
    solution = solver.solve(AllExamples(damped) if full else damped, gradients, generator=generators[0])
    norms = [torch.stack(rows) for rows in zip(*follower.norms, strict=True)]
    return Paired(solution.x, follower.displacement, *norms)


def parting_steps(lissa_norms: Tensor, distances: Tensor) -> Tensor:
    """Return the first step, from 1, at which SGD has parted from LiSSA, (T, K) each -> (K,); 0: never.

    Parted: ‖u_t + x_t‖ exceeds half of ‖x_t‖, or is not finite. On the same batches LiSSA is SGD's linearisation
    at θ*, so that it is SGD that has left the range of the quadratic approximation, or lost its digits.
    """
    parted = ~(distances <= PARTED * lissa_norms) | ~distances.isfinite()
    first = parted.to(torch.int8).argmax(0) + 1
    return torch.where(parted.any(0), first, torch.zeros_like(first))


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=0).nan_to_num(torch.inf, torch.inf)
