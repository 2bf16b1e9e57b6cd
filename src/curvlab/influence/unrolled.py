"""The exact derivative of test measurements by the weights of a training run's examples, back or along the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from curvlab.curvature.linearise import use_vmap
from curvlab.influence.derivatives import Measurement, checked_points, per_example_gradients
from curvlab.influence.results import Origin, PointScores
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import flatten, flatten_columns, unflatten
from curvlab.problem import Batches, Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.shown import Summary, counted
from curvlab.training import Replay, ReplayedStep, TrainingHistory, TrainingRun
from curvlab.training.history import State

# How far the replay may end from the model, relative to how far the run went: rounding, which training amplifies.
_GAP = {torch.float64: 1e-6, torch.float32: 1e-2}
Reduction = Literal["none", "mean"]


@dataclass(frozen=True, repr=False)
class UnrolledResponse(PointScores):
    """Derivatives through a training run.

    Attributes:
        scores: (num_measurements, num_points), N dm/dw_i: the change of a measurement per unit of weight that is
            added to example i's loss in the mean training loss, as influence scores have it. Leaving one of N
            points out is a weight of -1/N.
        mode: "reverse" or "forward".
        gap: ‖θ_T of the replay - the model's θ‖ / ‖model's θ - θ_0‖: rounding.
        num_stored_states: the most states of the training (1 + num_buffers vectors) held at a time.
        points: (num_points,), indices of the training examples that the columns belong to.
        origin: model, loss, data and settings that they are of.

    `top`, `table`, `plot`, `save` and `load` are as of `Influence`.
    """

    scores: Tensor
    mode: str
    gap: float
    num_stored_states: int
    points: Tensor | None = None
    origin: Origin | None = None

    parts: ClassVar[Mapping[str, type]] = {"origin": Origin}

    def summary(self) -> Summary:
        """Return the range of the scores, and how well the training was replayed."""
        return Summary(
            "unrolled response",
            f"from {float(self.scores.min()):.3g} to {float(self.scores.max()):.3g} ({self.sign_and_unit})",
            f"{self.scores.shape[0]:,} x {self.scores.shape[1]:,} scores; the replay ends {self.gap:.2g} away",
            (f"{self.mode} mode", f"{counted(self.num_stored_states, 'state')} held at most"),
        )


@can_be_silent
def unrolled_response(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
    test: Data | None = None,
    *,
    run: TrainingRun | TrainingHistory,
    points: Tensor | Sequence[int] | None = None,
    measurement: Measurement | None = None,
    reduction: Reduction = "none",
    mode: Literal["auto", "reverse", "forward"] = "auto",
    progress: bool | str = True,
    callback: Callable[[BackState | AlongState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
) -> UnrolledResponse:
    """Return N dm(θ_T)/dw_i of every test example's measurement m by the weight w_i of every training example.

    θ_T(w) is where the run ends when each batch has the loss 1/|B| sum_i w_i l_i; the derivative is taken at the
    run's own weights and is exact, the optimizer's momentum and moving averages included (Hara, Nitanda & Maehara
    2019 for plain SGD). Reverse mode goes back once for all examples, with one column for each measurement: of
    θ_{t+1} = U(θ_t, g_t), λ_t = ∂_θ Uᵀ λ_{t+1} + H_B ∂_g Uᵀ λ_{t+1}. Forward mode carries dθ_t/dw_i along, one
    column for each point, and stores nothing.

    Args:
        model: as trained by `run`; the derivative is refused where the replay does not end at its parameters. Or a
            `Problem` in the place of model, loss and train_data.
        loss: as `train` had it: with a closed form, or any mean over examples of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: what `train(..., record=True)` returned, or a `TrainingRun`.
        points: indices of the training examples that are asked for; None: all.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        reduction: "mean" for the mean measurement alone, one row of scores.
        mode: "auto": reverse, unless there are fewer points than measurements and the loss has a closed form
            (PyTorch has no forward mode for the derivatives of some others, such as nn.HuberLoss).
        progress: show a bar of the run's steps, of reverse mode there and back.
        callback: called with the `BackState` or the `AlongState` after each step.
        checkpoint: file in which the unfinished derivative is kept; the same call goes on there.

    Cost: reverse three trainings, and a second backward pass of each batch for every measurement; forward one
    training, and a tangent of a gradient for every point. Memory: reverse 2 √T + 1 states, forward none; for each
    column a state, and the activations of a batch. The run's batches are part of what is differentiated, and
    are not cut.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise ValueError(f"mode must be 'auto', 'reverse' or 'forward', got {mode!r}")
    replay = Replay(model, loss, train_data, run=run)
    chosen = checked_points(points, replay.num_examples)
    gradients = measured_gradients(replay.problem, test, measurement=measurement, reduction=reduction)
    if mode == "auto":
        fewer = len(chosen) < len(gradients) and not replay.problem.loss.twice_backward
        mode = "forward" if fewer else "reverse"
    saving: dict[str, Any] = {"progress": progress, "callback": callback, "checkpoint": checkpoint}
    if mode == "reverse":
        back = _Back(replay, gradients)
        total = back.ahead + replay.run.num_steps
        derivatives, end = iterate(back, name="back through the run", total=total, **saving)
        scores = derivatives[:, chosen.to(derivatives.device)]
    else:
        along = _Along(replay, chosen)
        columns, end = iterate(along, name="along the run", total=replay.run.num_steps, **saving)
        scores = gradients @ columns
    gap, states = checked_gap(replay, end), replay.peak_states
    origin = Origin.of(replay.problem, measured=measurement is not None, curvature="the training itself")
    return UnrolledResponse(replay.num_examples * scores, mode, gap, states, chosen, origin)


def checked_gap(replay: Replay, end: State) -> float:
    """Return how far the replay ends from the model, or raise a ValueError where that is not rounding."""
    trained = flatten(replay.problem.parameters)
    start = replay.first_state()[0]
    gap = float((end[0] - trained).norm() / (trained - start).norm().clamp(min=torch.finfo(trained.dtype).tiny))
    if not gap <= _GAP.get(trained.dtype, 1e-2):
        dtype = str(trained.dtype).removeprefix("torch.")
        raise ValueError(
            f"the replayed run ends elsewhere than the model: {gap:.2g} of the way from its start. Check that "
            "start, batches, rule and example_weights are those of this training, and that its gradients were "
            "neither clipped nor an embedding's own (padding_idx, scale_grad_by_freq: train without); in "
            f"{dtype} a long or unstable training cannot be replayed: train in float64."
        )
    return gap


def measured_gradients(
    problem: Problem, test: Data | None, *, measurement: Measurement | None, reduction: Reduction
) -> Tensor:
    """Return each test example's gradient, (M, P), or that of their mean, (1, P), some examples at a time."""
    if reduction not in ("none", "mean"):
        raise ValueError(f"reduction must be 'none' or 'mean', got {reduction!r}")
    if test is None:
        raise TypeError("pass test=..., the examples that are measured")
    tested = problem.with_data(Batches.of(problem.function, test, batch_size=64, name="test"))
    if reduction == "none":
        return per_example_gradients(tested, measurement=measurement)
    total = torch.zeros(1, problem.num_parameters, device=problem.device, dtype=problem.dtype)
    for inputs, targets in tested.data:
        batch = replace(tested, selected=[(inputs, targets, None)])
        total += per_example_gradients(batch, measurement=measurement).sum(0)
    return total / tested.num_examples


# -------------------------------------------------------------------------------- back through the run
@dataclass
class BackState:
    """How far the way back is.

    Attributes:
        kept: every √T-th state of the run, as long as the way back needs it.
        at: the state on the way to the end.
        columns: (K, P) each, derivatives of the measurements by the parameters and the optimizer's vectors there.
        derivatives: (K, N), by the weights, so far.
        last: of the run.
        peak_states: the most states held at a time so far.
        num_steps: to the last state that is kept, and back.
    """

    kept: list[State]
    at: State
    columns: list[Tensor]
    derivatives: Tensor
    last: State = ()
    peak_states: int = 0
    num_steps: int = 0
    done: bool = False


@dataclass
class _Back:
    """dm/dw of K measurements, and the state in which the run ends.

    Attributes:
        replay: of the run.
        cotangents: (K, P), gradients of the measurements at its end.
    """

    replay: Replay
    cotangents: Tensor
    steps: Iterator[ReplayedStep] | None = field(default=None, init=False)

    @property
    def ahead(self) -> int:
        """Steps to the last state that is kept."""
        return (self.replay.run.num_steps - 1) // self.replay.spacing * self.replay.spacing

    def depends_on(self) -> Mapping[str, Any]:
        return {**self.replay.depends_on(), "cotangents": self.cotangents}

    def init(self) -> BackState:
        start, cotangents = self.replay.first_state(), self.cotangents
        columns = [cotangents, *(torch.zeros_like(cotangents) for _ in range(self.replay.run.rule.num_buffers))]
        derivatives = cotangents.new_zeros(len(cotangents), self.replay.num_examples)
        return BackState([start], start, columns, derivatives)

    def step(self, state: BackState) -> BackState:
        replay, number = self.replay, state.num_steps
        state.num_steps += 1
        if number < self.ahead:
            state.at = next(replay.forwards(state.at, first=number, stop=number + 1))
            if state.num_steps % replay.spacing == 0:
                state.kept.append(state.at)
            return state
        left = replay.run.num_steps - (number - self.ahead)
        self.steps = replay.backwards(state.kept, stop=left) if self.steps is None else self.steps
        self._pull_back(state, next(self.steps))
        replay.peak_states = state.peak_states = max(state.peak_states, replay.peak_states)
        state.done = left == 1
        return state

    def _pull_back(self, state: BackState, step: ReplayedStep) -> None:
        replay, columns = self.replay, state.columns
        gradient, sources = replay.gradient_with_graph(step)

        def update(*arguments: Tensor) -> State:
            *before, slope = arguments
            return replay.run.rule.update(tuple(before), slope, lr=step.lr, step=step.number + 1)

        after, pull_back = vjp(update, *step.state, gradient.detach())[:2]
        state.last = state.last or after
        *columns, of_gradient = vmap(pull_back)(tuple(columns))
        *of_parameters, of_weights = _pulled_back(
            gradient, sources, of_gradient, at_once=use_vmap(replay.function, "auto", step.inputs)
        )
        columns[0] = columns[0] + flatten_columns(of_parameters).T
        state.columns = columns
        state.derivatives.index_add_(1, step.indices.to(state.derivatives.device), of_weights)

    def result(self, state: BackState) -> tuple[Tensor, State]:
        return state.derivatives, state.last


def _pulled_back(
    gradient: Tensor, sources: Sequence[Tensor], cotangents: Tensor, *, at_once: bool
) -> list[Tensor]:
    """Return the derivatives of gradientᵀ c by each source, for each row c of (K, P): tensors (K, *shape)."""
    if at_once and len(cotangents) > 1:
        found = torch.autograd.grad(gradient, sources, cotangents, is_grads_batched=True, allow_unused=True)
        zeros = [source.new_zeros(len(cotangents), *source.shape) for source in sources]
        return [zero if each is None else each for each, zero in zip(found, zeros, strict=True)]
    rows = [
        torch.autograd.grad(
            gradient, sources, row, retain_graph=index + 1 < len(cotangents), materialize_grads=True
        )
        for index, row in enumerate(cotangents)
    ]
    return [torch.stack(of_one) for of_one in zip(*rows, strict=True)]


# ----------------------------------------------------------------------------------- along the run
@dataclass(frozen=True)
class AlongState:
    """How far the way along the run is.

    Attributes:
        at: parameters and the optimizer's vectors.
        tangents: their derivatives by K weights, (K, P) each.
        num_steps: of the run.
    """

    at: State
    tangents: State
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Along:
    """dθ_T/dw_i of K examples, (P, K), and the state in which the run ends.

    Cost: a training, and at each step a forward-mode derivative of the gradient for each column.
    """

    replay: Replay
    points: Tensor

    def depends_on(self) -> Mapping[str, Any]:
        return {**self.replay.depends_on(), "points": self.points}

    def init(self) -> AlongState:
        start = self.replay.first_state()
        return AlongState(start, tuple(vector.new_zeros(len(self.points), len(vector)) for vector in start))

    def step(self, state: AlongState) -> AlongState:
        step, number = self.replay.step(state.num_steps, state.at), state.num_steps + 1
        # Which of the batch's weights each column moves; an example may be there twice.
        of_weights = (step.indices[None] == self.points[:, None]).to(step.weights)
        at, tangents = _advanced(self.replay, step, state.tangents, of_weights)
        return AlongState(at, tangents, number, number == self.replay.run.num_steps)

    def result(self, state: AlongState) -> tuple[Tensor, State]:
        return state.tangents[0].T, state.at


def _advanced(
    replay: Replay, step: ReplayedStep, tangents: tuple[Tensor, ...], of_weights: Tensor
) -> tuple[State, State]:
    """Return the state after the step, and its derivatives along K directions."""

    def gradient(position: Tensor, weights: Tensor) -> Tensor:
        values = tuple(unflatten(position, replay.function.live_parameters))
        return flatten(grad(lambda v: replay.loss(v, step, weights))(values))

    def update(weights: Tensor, *state: Tensor) -> State:
        slope = gradient(state[0], weights)
        return replay.run.rule.update(state, slope, lr=step.lr, step=step.number + 1)

    def along(of_weights: Tensor, *tangents: Tensor) -> tuple[State, State]:
        after, moved = jvp(update, (step.weights, *step.state), (of_weights, *tangents))[:2]
        return after, moved

    if use_vmap(replay.function, "auto", step.inputs):
        return vmap(along, out_dims=(None, 0))(of_weights, *tangents)  # type: ignore[arg-type]  # a prefix of the outputs
    found = [along(*column) for column in zip(of_weights, *tangents, strict=True)]
    moved = zip(*(each for _, each in found), strict=True)
    return found[0][0], tuple(torch.stack(column) for column in moved)
