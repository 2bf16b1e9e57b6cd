"""Independent trials of LiSSA in the counter-example of App. B.4, all at once."""

from __future__ import annotations

from collections.abc import Iterator

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


def lissa_errors(
    eigenvalues: Tensor,
    damping: float,
    *,
    step_size: float,
    batch_size: int,
    gradient: Tensor,
    num_steps: int,
    num_trials: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yield u_t - u* of `Lissa` from u_0 = 0, (num_steps + 1, P, K) for one block of K trials after another."""
    solution = gradient / (eigenvalues + damping)
    for count in _blocks(num_trials, batch_size * len(eigenvalues)):
        iterates = [torch.zeros(len(eigenvalues), count, dtype=eigenvalues.dtype)]

        def keep(state: LissaState, iterates: list[Tensor] = iterates) -> None:
            iterates.append(state.x.clone())

        solver = Lissa(
            step_size,
            batch_size,
            num_steps,
            check_residual=False,
            raise_on_divergence=False,  # divergence is what is measured
            callback=keep,
        )
        operator = SignedFeatures(eigenvalues, count) + damping * identity
        solver.solve(operator, gradient[:, None].expand(-1, count).contiguous(), generator=generator)
        yield torch.stack(iterates) - solution[:, None]


def homogeneous_errors(
    eigenvalues: Tensor,
    damping: float,
    *,
    step_size: float,
    batch_size: int,
    start: Tensor,
    num_steps: int,
    num_trials: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yield u_t of the same iteration with g = 0 (u* = 0) from u_0 = start, as `lissa_errors` does."""
    for count in _blocks(num_trials, batch_size * len(eigenvalues)):
        operator = SignedFeatures(eigenvalues, count) + damping * identity
        iterates = [start[:, None].expand(-1, count)]
        for _ in range(num_steps):
            u = iterates[-1]
            iterates.append(u - step_size * (operator.sample(batch_size, generator) @ u))
        yield torch.stack(iterates)


def typical_growth(
    eigenvalues: Tensor,
    damping: float,
    *,
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
    for count in _blocks(num_trials, batch_size * len(eigenvalues)):
        operator = SignedFeatures(eigenvalues, count) + damping * identity
        u = operator.randn(count, generator)
        total = torch.zeros(count, dtype=eigenvalues.dtype)
        for step in range(num_steps):
            u = u - step_size * (operator.sample(batch_size, generator) @ u)
            norms = operator.norm(u)
            u = u / norms
            total += norms.log() if step >= burn_in else 0.0
        rates.append(total / (num_steps - burn_in))
    return torch.cat(rates)


def _blocks(num_trials: int, numbers_per_trial: int) -> list[int]:
    size = max(1, min(num_trials, BLOCK_NUMBERS // numbers_per_trial))
    full, rest = divmod(num_trials, size)
    return [size] * full + ([rest] if rest else [])
