"""Independent trials of LiSSA, all at once: on a sampled operator each column meets a batch of its own.

`SignedFeatures` is the counter-example of App. B.4; the problems of lissa-thm1 have finitely many examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import Lissa
from curvlab.solvers.lissa import LissaState

BLOCK_NUMBERS = 1_000_000  # signs held at once; more would leave the cache


class SignedFeatures(LinearOperator):
    """H = diag(λ) = E x xᵀ, x_i = ±sqrt(λ_i); on a sample each column meets a batch of its own, so is a trial.

    H is the Gauss-Newton matrix of the binary task of App. B.4 at θ = 0: outputs (θᵀx, -θᵀx), cross-entropy.
    """

    def __init__(self, eigenvalues: Tensor, num_trials: int) -> None:
        super().__init__(len(eigenvalues), dtype=eigenvalues.dtype, device=eigenvalues.device)
        self.eigenvalues, self.num_trials = eigenvalues, num_trials

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return H V."""
        return self.eigenvalues[:, None] * vectors

    @property
    def is_psd(self) -> bool:
        """True."""
        return True

    # Batches are uniform here.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> SignedBatches:
        """Draw num_trials independent batches. Cost: num_trials · batch_size · P signs."""
        shape = (self.num_trials, batch_size, self.shape[0])
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
        return SignedBatches((2.0 * signs - 1) * self.eigenvalues.sqrt())


class SignedBatches(LinearOperator):
    """Column k meets 1/|B| X_kᵀ X_k, X: (trials, |B|, P)."""

    def __init__(self, features: Tensor) -> None:
        super().__init__(features.shape[2], dtype=features.dtype, device=features.device)
        self.features = features

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the products, (P, trials); another number of columns is an error."""
        num_trials, batch_size, _ = self.features.shape
        if vectors.shape[1] != num_trials:
            raise ValueError(f"{num_trials} batches were drawn, for as many columns, got {vectors.shape[1]}")
        projections = self.features @ vectors.T[:, :, None]
        return (self.features.mT @ projections)[:, :, 0].T / batch_size

    @property
    def is_psd(self) -> bool:
        """True."""
        return True


def signed_blocks(eigenvalues: Tensor, num_trials: int, batch_size: int) -> Iterator[SignedFeatures]:
    """Yield operators whose trials together are `num_trials`, as many at a time as the cache holds."""
    for count in blocks(num_trials, BLOCK_NUMBERS // (batch_size * len(eigenvalues))):
        yield SignedFeatures(eigenvalues, count)


def blocks(num_trials: int, most: int) -> Iterator[int]:
    """Yield numbers that add up to `num_trials`, each `most` or fewer, and at least 1."""
    most = max(1, min(num_trials, most))
    for first in range(0, num_trials, most):
        yield min(most, num_trials - first)


def lissa_iterates(
    operator: LinearOperator,
    gradient: Tensor,
    num_trials: int,
    *,
    damping: float,
    step_size: float,
    batch_size: int,
    num_steps: int,
    shown: Collection[int],
    generator: torch.Generator,
) -> Tensor:
    """Return u_t of `Lissa` from u_0 = 0 for t in `shown` (increasing, from 1), (shown, P, trials).

    Args:
        operator: whose samples have `num_trials` columns.
        gradient: (P,), the right-hand side of every trial.
        num_trials: columns.
        damping: added to the operator.
        step_size: η.
        batch_size: |B|.
        num_steps: at least the last of `shown`.
        shown: steps.
        generator: of the batches.
    """
    kept: list[Tensor] = []

    def keep(state: LissaState) -> None:
        if state.num_steps in shown:
            kept.append(state.x.clone())

    # Divergence is what is measured.
    solver = Lissa(
        step_size, batch_size, num_steps, check_residual=False, raise_on_divergence=False, callback=keep
    )
    sides = gradient[:, None].expand(-1, num_trials).contiguous()
    solver.solve(operator + damping * identity, sides, generator=generator)
    return torch.stack(kept)


def iterates_from(
    operator: LinearOperator,
    gradient: Tensor,
    start: Tensor,
    num_trials: int,
    *,
    damping: float,
    step_size: float,
    batch_size: int,
    num_steps: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yield u_t of the same iteration from u_0 = start, (P,), for t = 0, ..., num_steps, (P, trials) each."""
    damped = operator + damping * identity
    u = start[:, None].expand(-1, num_trials)
    yield u
    for _ in range(num_steps):
        u = u - step_size * (damped.sample(batch_size, generator) @ u - gradient[:, None])
        yield u


def typical_growth(
    eigenvalues: Tensor,
    *,
    damping: float,
    step_size: float,
    batch_size: int,
    num_steps: int,
    num_trials: int,
    generator: torch.Generator,
) -> Tensor:
    """Return log‖u_t‖ / t of each trial for g = 0, (num_trials,): almost every trial grows at its limit.

    The top Lyapunov exponent of the product of matrices; norms are set back to 1 in every step, and the first
    quarter of the steps is left out. By Jensen's inequality it is at most half the log of the second moment's
    spectral radius: where one is negative and the other positive, trials converge and their second moment not.
    """
    rates = []
    burn_in = num_steps // 4
    for block in signed_blocks(eigenvalues, num_trials, batch_size):
        operator = block + damping * identity
        u = operator.randn(block.num_trials, generator)
        total = torch.zeros(block.num_trials, dtype=eigenvalues.dtype)
        for step in range(num_steps):
            u = u - step_size * (operator.sample(batch_size, generator) @ u)
            norms = operator.norm(u)
            u = u / norms
            total += norms.log() if step >= burn_in else 0.0
        rates.append(total / (num_steps - burn_in))
    return torch.cat(rates)
