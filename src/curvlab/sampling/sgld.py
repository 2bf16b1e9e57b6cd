"""Stochastic gradient Langevin dynamics of several chains, plain and with a diagonal preconditioner."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import not_negative, positive, real, whole
from curvlab.training import EnsembleLosses

_NUMBERS_AHEAD = 2**16  # random numbers a chain draws at once
_MAX_STEPS_AHEAD = 256


@dataclass(frozen=True)
class RMSProp:
    """G = diag(1/(damping + sqrt(V))), V <- decay V + (1 - decay) g², g the gradient of a batch's mean loss.

    Li, Chen, Carlson & Carin (2016), Eqs. 4 and 5; V starts at the first batch's g². While V changes from step to
    step, the density that is sampled is the wrong one by a term Γ(w), the derivatives of G, which they drop. Here
    V of each chain is learned in the first half of the burn-in and then stands still: with a constant G there is
    no Γ, and after the second half the draws are from the density of `SGLD` up to the step size. (Learned to the
    end of the burn-in, flat directions kept the wrong density, and an estimate was too high.) At a
    minimum g is a batch's noise alone, V its variance.

    devinterp's `rmsprop_sgld` has the same G (their eps 0.1 is our damping, their alpha our decay), but goes on
    changing it while it draws, and adds Γ on request only.

    Attributes:
        decay: of the moving average.
        damping: λ, in units of the gradient of the mean loss; entries of gradients well below it take equal steps.
    """

    decay: float = 0.99
    damping: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= real("decay", self.decay) < 1 or not 0 < real("damping", self.damping) < math.inf:
            raise ValueError(
                f"decay lies between 0 and 1 and damping is positive, got {self.decay} and {self.damping}: "
                "without damping a parameter of no gradient would take infinite steps."
            )

    def learn_(self, second_moments: Sequence[Tensor], gradients: Sequence[Tensor], *, first: bool) -> None:
        """Bring a step's gradients into V, in place; both by parameter, (C, ...)."""
        for moment, gradient in zip(second_moments, gradients, strict=True):
            if first:
                moment.copy_(gradient.square())
            else:
                moment.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)

    def diagonal(self, second_moments: Tensor) -> Tensor:
        """Return the diagonal of G, shaped as V."""
        return torch.reciprocal(second_moments.sqrt().add_(self.damping))


@dataclass(frozen=True)
class Draws:
    """Random numbers for several steps, drawn at once.

    For a small model one call for each step and each chain would take longer than the step itself.

    Attributes:
        noise: (C, S, P), standard deviation sqrt(step_size).
        indices: (C, S, B) examples, or None when every step takes all the data.
        used: how many of the steps are used up.
    """

    noise: Tensor
    indices: Tensor | None
    used: int = 0

    @property
    def num_left(self) -> int:
        """Steps whose numbers are not used up."""
        return self.noise.shape[1] - self.used


@dataclass(frozen=True)
class SGLDState:
    """What is carried from step to step.

    Attributes:
        positions: (C, P). `step` writes the next positions into this tensor, so the state that it was given cannot
            be used again.
        generators: one for each chain, the only source of its batches and its noise.
        draws: what was drawn from them ahead.
        second_moments: V of `RMSProp`, (C, P); None without a preconditioner. `step` writes into it, too.
        momenta: of `UnderdampedLangevin`, (C, P), times sqrt(step_size); None of `SGLD`. Likewise.
    """

    positions: Tensor
    generators: tuple[torch.Generator, ...]
    draws: Draws
    num_steps: int
    second_moments: Tensor | None = None
    momenta: Tensor | None = None


@dataclass(frozen=True)
class SGLDInfo:
    """What a step saw, and may be plotted.

    Attributes:
        losses: (C,), L_B(w_c) on the step's batches, at the positions before the step.
        start_losses: (C,), L_B(w0) on the same batches.
    """

    losses: Tensor
    start_losses: Tensor


class SGLD:
    """w <- w - step_size/2 [nbeta grad L_B(w) + localization (w - w0)] + sqrt(step_size) xi, xi standard normal.

    Welling & Teh (2011); the localized, tempered form of Lau et al. (2023), whose stationary density for small
    steps is exp(-nbeta L(w) - localization/2 |w - w0|²). Saghir et al. (2024), Eq. 20, prints localization
    without the 1/2, their Eq. 21 implies it. Along an eigenvalue κ of nbeta H + localization the stationary
    variance is 1/(κ (1 - step_size κ/4)) with full batches: step_size must be well below 4/κ.

    With a preconditioner G the step is step_size/2 G [...] + sqrt(step_size G) xi, and κ an eigenvalue of
    G^½ (nbeta H + localization) G^½.

    Chain c uses generator c alone, in the same order whatever other chains run beside it.

    Args:
        losses: model, loss and data.
        step_size: ε.
        nbeta: inverse temperature times number of examples.
        localization: γ, pull towards w0.
        batch_size: examples of a chain's batch, drawn with replacement; from N on, all data at every step.
        preconditioner: of the steps; None: the identity.
        num_burnin_steps: in whose first half the preconditioner is learned, at least 2 where there is one.
    """

    def __init__(
        self,
        losses: EnsembleLosses,
        *,
        step_size: float,
        nbeta: float,
        localization: float,
        batch_size: int,
        preconditioner: RMSProp | None = None,
        num_burnin_steps: int = 0,
    ) -> None:
        positive("step_size", step_size, "`choose_sgld_settings` finds one.")
        not_negative("nbeta", nbeta)
        not_negative("localization", localization)
        whole("batch_size", batch_size)
        if preconditioner is not None and not isinstance(preconditioner, RMSProp):
            raise TypeError(f"preconditioner is RMSProp(...) or None, got {preconditioner!r}")
        if preconditioner is not None and num_burnin_steps < 2:
            raise ValueError(
                "a preconditioner is learned in the first half of the burn-in: take num_burnin_steps of at least "
                f"2, got {num_burnin_steps}."
            )
        self.losses, self.preconditioner, self.num_burnin_steps = losses, preconditioner, num_burnin_steps
        self.step_size, self.nbeta, self.localization = step_size, nbeta, localization
        self.batch_size = None if batch_size >= losses.num_examples else batch_size
        self._buffer: Tensor | None = None
        size = max(len(losses.start), 1 if self.batch_size is None else self.batch_size)
        self.steps_ahead = max(1, min(_MAX_STEPS_AHEAD, _NUMBERS_AHEAD // size))

    @property
    def reach(self) -> float:
        """Length of a plain SGLD step that moves flat directions as far as one of these, in units of step_size."""
        return 1.0

    def depends_on(self) -> Mapping[str, Any]:
        """Return all that chains depend on beside their seeds. Cost: one reading of the data."""
        losses = self.losses
        names = ("step_size", "nbeta", "localization", "batch_size")
        found: dict[str, Any] = {name: getattr(self, name) for name in names} | {"sampler": type(self).__name__}
        found |= {"parameters": losses.start, "losses of the data": losses.start_losses}
        found["data"] = losses
        if losses.example_weights is not None:
            found["weights"] = losses.example_weights
        if self.preconditioner is not None:
            found |= {"preconditioner": asdict(self.preconditioner), "num_burnin_steps": self.num_burnin_steps}
        return found

    def init(self, generators: Sequence[torch.Generator]) -> SGLDState:
        """Return the state with every chain at w0, one for each generator (on the model's device)."""
        positions = self.losses.start.repeat(len(generators), 1)
        moments = None if self.preconditioner is None else torch.zeros_like(positions)
        return SGLDState(positions, tuple(generators), Draws(positions[:, None][:, :0], None), 0, moments)

    def step(self, state: SGLDState) -> tuple[SGLDState, SGLDInfo]:
        """Take one step with all chains; `state` is used up.

        Cost: a forward, a backward and P normals for each chain.
        """
        draws = state.draws if state.draws.num_left else self._draw(state.generators)
        indices = None if draws.indices is None else draws.indices[:, draws.used]
        if indices is None:
            batch = self.losses.batch(None)
            start_losses = self.losses.start_losses.mean().expand(len(state.positions))
        else:
            batch, start_losses = self.losses.batch(indices), self.losses.start_loss(indices)
        losses, gradients = self.losses.losses_and_gradients(
            state.positions,
            batch,
            shared=indices is None,
            weights=self.losses.weights_of(indices, len(state.positions)),
        )
        self._move(state, gradients, draws.noise[:, draws.used])
        after = replace(state, draws=replace(draws, used=draws.used + 1), num_steps=state.num_steps + 1)
        return after, SGLDInfo(losses, start_losses)

    def _draw(self, generators: Sequence[torch.Generator]) -> Draws:
        shape = (len(generators), self.steps_ahead, len(self.losses.start))
        if self._buffer is None or self._buffer.shape != shape:
            self._buffer = self.losses.start.new_empty(shape)
        for noise, generator in zip(self._buffer, generators, strict=True):
            noise.normal_(0.0, math.sqrt(self.step_size), generator=generator)
        if self.batch_size is None:
            return Draws(self._buffer, None)
        return Draws(self._buffer, self.losses.draw(self.steps_ahead, self.batch_size, generators))

    @torch.no_grad()
    def _move(self, state: SGLDState, gradients: Sequence[Tensor], noise: Tensor) -> None:
        if self.preconditioner is not None:
            return self._move_preconditioned(state, gradients, noise, self.preconditioner)
        self._descend(state.positions, state.positions, gradients, 0.5 * self.step_size)
        state.positions.add_(noise)

    def _descend(self, moved: Tensor, positions: Tensor, gradients: Sequence[Tensor], step: float) -> None:
        """Subtract step [nbeta grad L_B(positions) + localization (positions - w0)] from `moved`, in place."""
        if self.localization > 0 and moved is positions:
            moved.lerp_(self.losses.start.expand_as(moved), step * self.localization)
        elif self.localization > 0:
            moved.add_(positions - self.losses.start, alpha=-step * self.localization)
        for view, gradient in zip(self.losses.views(moved), gradients, strict=True):
            view.add_(gradient, alpha=-step * self.nbeta)

    def _move_preconditioned(
        self, state: SGLDState, gradients: Sequence[Tensor], noise: Tensor, preconditioner: RMSProp
    ) -> None:
        positions, moments = state.positions, state.second_moments
        if moments is None:
            raise ValueError("the state has no second moments: begin with `init` of this sampler.")
        if state.num_steps < self.num_burnin_steps // 2:
            preconditioner.learn_(self.losses.views(moments), gradients, first=state.num_steps == 0)
        diagonal = preconditioner.diagonal(moments)
        move = (positions - self.losses.start).mul_(self.localization)
        for view, gradient in zip(self.losses.views(move), gradients, strict=True):
            view.add_(gradient, alpha=self.nbeta)
        positions.addcmul_(move, diagonal, value=-0.5 * self.step_size).addcmul_(noise, diagonal.sqrt())

    def scales(self, state: SGLDState) -> Tensor | None:
        """Return the diagonal of G, (C, P), as it is; None without a preconditioner."""
        if self.preconditioner is None or state.second_moments is None:
            return None
        return self.preconditioner.diagonal(state.second_moments)

    def for_thread(self) -> SGLD:
        """Return the same sampler with a model and a buffer of its own."""
        other = copy.copy(self)
        other.losses, other._buffer = self.losses.for_thread(), None
        return other


def check_nbeta(nbeta: float) -> None:
    """Refuse an inverse temperature at which the chains would not see the loss."""
    positive("nbeta", nbeta, "None is n / ln n.")


def default_nbeta(num_examples: int) -> float:
    """Return n / ln n, the temperature of WBIC (Watanabe 2013); n is the size of the data, not of a batch."""
    whole("num_examples", num_examples, least=3, why="n / ln n needs them; or pass nbeta")
    return num_examples / math.log(num_examples)
