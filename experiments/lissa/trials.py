"""Independent trials of LiSSA, all at once: on a sampled operator each column meets a batch of its own.

`SignedFeatures` is the counter-example of App. B.4, `IsotropicFeatures` one that keeps Lemma 1; the problems of
lissa-thm1 have finitely many examples; `RunsOperator` has a trained network's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.examples import covering_layers, recorded
from curvlab.curvature.layers import LayerRows
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


class IsotropicFeatures(SignedFeatures):
    """H = I, P coordinates: x of a uniform direction and ‖x‖² = P ± sqrt(P), with which C.1 is an equality."""

    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> SignedBatches:
        """Draw num_trials independent batches."""
        shape, size = (self.num_trials, batch_size), self.shape[0]
        directions = torch.randn(*shape, size, generator=generator, dtype=self.dtype)
        signs = 2.0 * torch.randint(0, 2, (*shape, 1), generator=generator) - 1
        radii = (size + signs * size**0.5).sqrt()
        return SignedBatches(directions / directions.norm(dim=2, keepdim=True) * radii)


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


class RunsOperator(LinearOperator):
    """G of a network; on a sample each of `num_runs` groups of columns meets a batch of its own, so is a run.

    The network stays as it is while LiSSA runs, so the rows of all its examples are held, layer by layer.

    Args:
        operator: G.
        rows: `rows_of` it.
        num_runs: groups; the columns of one stand side by side.
    """

    def __init__(self, operator: GaussNewtonOperator, rows: list[LayerRows], num_runs: int) -> None:
        super().__init__(operator.shape[0], dtype=operator.dtype, device=operator.device)
        self.operator, self.rows, self.num_runs = operator, rows, num_runs

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V."""
        return self.operator @ vectors

    @property
    def is_psd(self) -> bool:
        """True: a sum of outer products of rows."""
        return True

    # Batches are uniform here.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> RunsBatches:
        """Draw num_runs independent batches."""
        size = len(self.rows[0].activations)
        return RunsBatches(self, torch.randint(size, (self.num_runs, batch_size), generator=generator))


class RunsBatches(LinearOperator):
    """Columns of run r meet 1/|B| sum_{i in B_r} G_i. Cost: 4 |B| P multiplications a column."""

    def __init__(self, runs: RunsOperator, drawn: Tensor) -> None:
        super().__init__(runs.shape[0], dtype=runs.dtype, device=runs.device)
        self.drawn = drawn
        self.parts = [
            (part.layer, part.activations[drawn, 0], part.signals[drawn, :, 0].flatten(1, 2)) for part in runs.rows
        ]  # (R, |B|, I), (R, |B| C, O)

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the products, (P, columns), an equal number of columns for each run."""
        num_runs, size = self.drawn.shape
        projected: Tensor | float = 0.0  # (R, K, |B|, C)
        for layer, activations, signals in self.parts:
            inner = layer.matrix(vectors).unflatten(0, (num_runs, -1)) @ activations.mT[:, None]  # (R, K, O, |B|)
            by_example = signals.unflatten(1, (size, -1))[:, None]  # (R, 1, |B|, C, O)
            projected = projected + (by_example @ inner.mT[..., None])[..., 0]
        products = torch.empty_like(vectors)
        for layer, activations, signals in self.parts:
            by_example = signals.unflatten(1, (size, -1))[:, None]
            outer = (by_example.mT @ projected[..., None])[..., 0]  # type: ignore[index]  # (R, K, |B|, O)
            layer.write((outer.mT @ activations[:, None]).flatten(0, 1) / size, products)
        return products

    @property
    def is_psd(self) -> bool:
        """True."""
        return True


def rows_of(operator: LinearOperator) -> list[LayerRows] | None:
    """Return the rows of all examples; None unless linear layers, each used once, hold all parameters."""
    if not isinstance(operator, GaussNewtonOperator) or (layers := covering_layers(operator)) is None:
        return None
    found = []
    for inputs, targets in operator.problem.data.in_fixed_order():
        batch = recorded(operator, layers, inputs, targets)
        if set(batch.num_places()) != {1}:
            return None
        found.append(batch.rows(operator.loss.hessian_factors(batch.outputs, targets)))
    joined = []
    for parts in zip(*found, strict=True):
        activations, signals = ([getattr(part, name) for part in parts] for name in ("activations", "signals"))
        joined.append(LayerRows(parts[0].layer, torch.cat(activations), torch.cat(signals)))
    return joined


def signed_blocks(
    eigenvalues: Tensor, num_trials: int, batch_size: int, kind: type[SignedFeatures] = SignedFeatures
) -> Iterator[SignedFeatures]:
    """Yield operators whose trials together are `num_trials`, as many at a time as the cache holds."""
    for count in blocks(num_trials, BLOCK_NUMBERS // (batch_size * len(eigenvalues))):
        yield kind(eigenvalues, count)


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
