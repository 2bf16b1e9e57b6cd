"""Influence after a training by Adam: the damping is a diagonal, one length for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.arguments import positive
from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.derivatives import checked_points, directional_derivatives, per_example_gradients
from curvlab.influence.results import Origin
from curvlab.influence.scores import Influence, saving
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import DerivedOperator, LinearOperator, identity
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.solvers import Solver, default_solver
from curvlab.training import Replay, TrainingHistory, TrainingRun
from curvlab.training.history import AdamRule, State


@can_be_silent
def adam_times(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
    run: TrainingRun | TrainingHistory | None = None,
    *,
    progress: bool | str = True,
    callback: Callable[[TimesState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
) -> Tensor:
    """Return τ_i = Σ_t η_t / (sqrt(v̂_ti) + eps), (P,): how far a run of Adam goes along a constant gradient.

    Its unit is that of SGD's ηT, squared parameter per loss. v̂ is Adam's corrected mean square on the way, which
    the run is walked through again for. τ_i = 0 where a gradient has been 0 at every step: such a parameter was
    moved by no example.

    Args:
        model: as trained; or a `Problem` in the place of model, loss and train_data.
        loss: as `train` had it.
        train_data: as `train` had it.
        run: what `train(..., optimizer="adam", record=True)` returned.
        progress: show a bar.
        callback: called with the `TimesState` after each step.
        checkpoint: file in which it is kept; the same call goes on there.

    Cost: one training.
    """
    if run is None:
        raise TypeError("pass run=..., what train(..., optimizer='adam', record=True) returned")
    replay = Replay(model, loss, train_data, run=run)
    rule = replay.run.rule
    if not isinstance(rule, AdamRule):
        raise ValueError(
            f"the run is one of {type(rule).__name__}, not of Adam: influence(run=...) has the length of SGD"
        )
    return iterate(
        _Times(replay, rule),
        name="lengths of Adam",
        total=replay.run.num_steps,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class TimesState:
    """Where the run is.

    Attributes:
        at: its state.
        times: τ so far, (P,).
        num_steps: of the run.
    """

    at: State
    times: Tensor
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Times:
    replay: Replay
    rule: AdamRule

    def depends_on(self) -> Mapping[str, Any]:
        return self.replay.depends_on()

    def init(self) -> TimesState:
        start = self.replay.first_state()
        return TimesState(start, torch.zeros_like(start[0]))

    def step(self, state: TimesState) -> TimesState:
        number = state.num_steps + 1
        at = next(self.replay.forwards(state.at, first=number - 1, stop=number))
        times = state.times + self.rule.rates(at, lr=self.replay.run.learning_rates[number - 1], step=number)
        return TimesState(at, times, number, number == self.replay.run.num_steps)

    def result(self, state: TimesState) -> Tensor:
        return torch.where(state.at[2] > 0, state.times, 0.0)


@can_be_silent
def preconditioned_influence(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
    test: Data | None = None,
    *,
    run: TrainingRun | TrainingHistory,
    points: Tensor | Sequence[int] | None = None,
    times: Tensor | None = None,
    solver: Solver | None = None,
    rtol: float = 1e-2,
    progress: bool = True,
    callback: Callable[[Any], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int | None = None,
) -> Influence:
    """Return -∇l(test)ᵀ (G + D)⁻¹ ∇l(z) with the diagonal D = 1/τ of a training by Adam.

    Near its end the run moves by dθ/dt = -P g, P = η diag(1 / (sqrt(v̂) + eps)). A weight ε on z's loss changes
    it by δ with dδ/dt = -P (G δ + ε ∇l(z)): after the time T, δ = -ε (1 - e^{-T P G}) G⁻¹ ∇l(z), which
    (G + (T P)⁻¹)⁻¹ imitates as 1 / (μ + 1/(ηT)) does the filter of SGD, with τ, P summed over the steps, for T P
    (`adam_times`). Adam's L2 adds `weight_decay`, AdamW's adds weight_decay Σ_t η_t / τ. Left out: that ε changes
    v̂, too (`unrolled_response` has it), and that v̂ is another during the run.

    With nothing to tune it correlates with `unrolled_response` about as well as the best of a grid of single
    dampings for all parameters, which moves by more than an order of magnitude as a training goes on.

    With S = τ^½ the systems are (S G S + I) y = S b, x = S y: symmetric, and no worse than G + I where S is 1.

    Args:
        model: as trained by `run`, in eval mode; or a `Problem` in the place of model, loss and train_data.
        loss: as `train` had it, with a closed form or a mean of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: of Adam or AdamW, recorded.
        points: indices of the training examples that are asked for; None: all.
        times: τ, where it is known: of `adam_times`.
        solver: of the scaled system; None: `default_solver`.
        rtol: residual of the default solver.
        progress: show bars.
        callback: called with the solver's state after each of its steps.
        checkpoint: file in which the unfinished solve is kept; the same call goes on there. τ is found again,
            unless `times` has it: `adam_times` has a checkpoint of its own.
        generator: of the solver, or a seed.

    Cost: one training for τ, then as `influence` for the test examples.
    """
    recorded = TrainingRun.of(run)
    rule = recorded.rule
    if test is None:
        raise TypeError("pass test=..., the examples that are measured")
    rtol, opened = positive("rtol", rtol), Problem.of(model, loss, train_data)
    times = adam_times(opened, run=recorded) if times is None else times
    if not isinstance(rule, AdamRule) or times.shape != recorded.start.shape or not bool((times >= 0).all()):
        raise ValueError(
            f"times must be (P,) = {tuple(recorded.start.shape)} and not negative, of a run of Adam; got shape "
            f"{tuple(times.shape)} of {type(rule).__name__}"
        )
    decay = rule.weight_decay * (sum(recorded.learning_rates) if rule.decoupled else times)
    scale = (times / (1 + decay)).sqrt()  # 1 / (1/τ + decay)
    problem = opened.normalised()
    chosen = checked_points(points, problem.num_examples)
    sides = scale[:, None] * per_example_gradients(problem.with_data(test)).T
    damped = Scaled(GaussNewtonOperator(problem), scale) + identity
    if solver is None:
        solver = default_solver(damped.shape[0], sides.shape[1], rtol=rtol)
    solution = saving(solver, callback, checkpoint).solve(
        damped, sides, generator=generator_of(generator, damped.device)
    )
    scores = -directional_derivatives(problem, directions=scale[:, None] * solution.x).T
    origin = Origin.of(problem, damping="1/τ of the run of Adam", curvature="Gauss-Newton", solver=solver)
    return Influence(scores[:, chosen.to(scores.device)], solution, "test", chosen, origin)


class Scaled(DerivedOperator):
    """S A S + C for diagonals S, (P,), and C, (P,) and not negative, or 0."""

    def __init__(self, origin: LinearOperator, scale: Tensor, shift: Tensor | None = None) -> None:
        super().__init__(origin)
        self._scale = scale[:, None]
        self._shift = torch.zeros_like(self._scale) if shift is None else shift[:, None]

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return (S A S + C) V. Cost: a product with A."""
        return self._scale * (self.origin @ (self._scale * vectors)) + self._shift * vectors

    @property
    def is_psd(self) -> bool:
        """Whether A is known to be."""
        return self.origin.is_psd
