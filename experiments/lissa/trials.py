"""Independent trials of LiSSA, all at once: on a sampled operator each column meets a batch of its own.

`SignedFeatures` is the counter-example of App. B.4, `IsotropicFeatures` one that keeps Lemma 1; the problems of
lissa-thm1 have finitely many examples; `RunsOperator` has a trained network's.
"""

from __future__ import annotations

from abc import abstractmethod
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


class Trials(LinearOperator):
    """A positive semi-definite matrix; on a sample each group of columns meets a batch of its own, so is a trial.

    Subclasses say what is drawn and what a product with it is. Batches are uniform here.

    Args:
        size: P.
        num_trials: groups; the columns of one stand side by side.
        like: has the dtype and device of its vectors.
    """

    def __init__(self, size: int, num_trials: int, like: Tensor | LinearOperator) -> None:
        super().__init__(size, dtype=like.dtype, device=like.device)
        self.num_trials = num_trials

    @property
    def is_psd(self) -> bool:
        """True."""
        return True

    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Batches:
        """Draw num_trials independent batches."""
        return Batches(self, self.draw(batch_size, generator))

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Return num_trials independent batches."""

    @abstractmethod
    def product(self, drawn: Tensor, vectors: Tensor) -> Tensor:
        """Return the products of each trial's batch with its columns, (P, columns)."""


class Batches(LinearOperator):
    """What `Trials` have drawn."""

    def __init__(self, trials: Trials, drawn: Tensor) -> None:
        super().__init__(trials.shape[0], dtype=trials.dtype, device=trials.device)
        self.trials, self.drawn = trials, drawn

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the products, (P, columns), an equal number of columns for each trial; else it is an error."""
        number, columns = self.trials.num_trials, vectors.shape[1]
        if columns % number:
            raise ValueError(
                f"{number} batches were drawn, for as many columns or a multiple of them, got {columns}"
            )
        return self.trials.product(self.drawn, vectors)

    @property
    def is_psd(self) -> bool:
        """True."""
        return True


class SignedFeatures(Trials):
    """H = diag(λ) = E x xᵀ, x_i = ±sqrt(λ_i), one column a trial.

    H is the Gauss-Newton matrix of the binary task of App. B.4 at θ = 0: outputs (θᵀx, -θᵀx), cross-entropy.
    """

    def __init__(self, eigenvalues: Tensor, num_trials: int) -> None:
        super().__init__(len(eigenvalues), num_trials, eigenvalues)
        self.eigenvalues = eigenvalues

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return H V."""
        return self.eigenvalues[:, None] * vectors

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Return the features X, (trials, |B|, P). Cost: as many signs."""
        shape = (self.num_trials, batch_size, self.shape[0])
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
        return (2.0 * signs - 1) * self.eigenvalues.sqrt()

    def product(self, drawn: Tensor, vectors: Tensor) -> Tensor:
        """Return 1/|B| X_kᵀ X_k v_k."""
        projections = drawn @ vectors.T[:, :, None]
        return (drawn.mT @ projections)[:, :, 0].T / drawn.shape[1]


class IsotropicFeatures(SignedFeatures):
    """H = I, P coordinates: x of a uniform direction and ‖x‖² = P ± sqrt(P), with which C.1 is an equality."""

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Return the features X, (trials, |B|, P)."""
        shape, size = (self.num_trials, batch_size), self.shape[0]
        directions = torch.randn(*shape, size, generator=generator, dtype=self.dtype)
        signs = 2.0 * torch.randint(0, 2, (*shape, 1), generator=generator) - 1
        radii = (size + signs * size**0.5).sqrt()
        return directions / directions.norm(dim=2, keepdim=True) * radii


class RunsOperator(Trials):
    """G of a network; a trial is a run of all right-hand sides.

    The network stays as it is while LiSSA runs, so the rows of all its examples are held, layer by layer.

    Args:
        operator: G.
        rows: `rows_of` it.
        num_runs: trials.
    """

    def __init__(self, operator: GaussNewtonOperator, rows: list[LayerRows], num_runs: int) -> None:
        super().__init__(operator.shape[0], num_runs, operator)
        self.operator, self.rows = operator, rows

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V."""
        return self.operator @ vectors

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Return the places of examples, (runs, |B|)."""
        return torch.randint(len(self.rows[0].activations), (self.num_trials, batch_size), generator=generator)

    def product(self, drawn: Tensor, vectors: Tensor) -> Tensor:
        """Return 1/|B| sum_{i in B_r} G_i v for the columns of run r. Cost: 4 |B| P multiplications a column."""
        num_runs, size = drawn.shape
        projected: Tensor | float = 0.0  # (R, K, |B|, C)
        parts = [
            (part.layer, part.activations[drawn, 0], part.signals[drawn, :, 0][:, None]) for part in self.rows
        ]  # (R, |B|, I), (R, 1, |B|, C, O)
        for layer, activations, signals in parts:
            inner = layer.matrix(vectors).unflatten(0, (num_runs, -1)) @ activations.mT[:, None]  # (R, K, O, |B|)
            projected = projected + (signals @ inner.mT[..., None])[..., 0]
        products = torch.empty_like(vectors)
        for layer, activations, signals in parts:
            outer = (signals.mT @ projected[..., None])[..., 0]  # type: ignore[index]  # (R, K, |B|, O)
            layer.write((outer.mT @ activations[:, None]).flatten(0, 1) / size, products)
        return products


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
    operator: Trials,
    gradient: Tensor,
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
        operator: its trials have one column each.
        gradient: (P,), the right-hand side of every trial.
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
    sides = gradient[:, None].expand(-1, operator.num_trials).contiguous()
    solver.solve(operator + damping * identity, sides, generator=generator)
    return torch.stack(kept)


def iterates_from(
    operator: Trials,
    gradient: Tensor,
    start: Tensor,
    *,
    damping: float,
    step_size: float,
    batch_size: int,
    num_steps: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yield u_t of the same iteration from u_0 = start, (P,), for t = 0, ..., num_steps, (P, trials) each."""
    damped = operator + damping * identity
    u = start[:, None].expand(-1, operator.num_trials)
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
