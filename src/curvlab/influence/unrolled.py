"""The exact derivative of test measurements by the weights of a training run's examples, back or along the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from curvlab.curvature.linearise import use_vmap
from curvlab.influence.derivatives import Measurement, checked_points, per_example_gradients
from curvlab.influence.results import Origin, PointScores
from curvlab.linalg import flatten, flatten_columns, unflatten
from curvlab.problem import Data, Problem, output_loss
from curvlab.progress import can_be_silent, progress_bar
from curvlab.shown import Summary, counted
from curvlab.training import Replay, ReplayedStep, TrainingHistory, TrainingRun
from curvlab.training.history import State
from curvlab.training.own_batches import TrainingData
from curvlab.training.steps import Loss

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
    model: nn.Module,
    loss: Loss,
    train_data: TrainingData,
    test: Data,
    *,
    run: TrainingRun | TrainingHistory,
    points: Tensor | Sequence[int] | None = None,
    measurement: Measurement | None = None,
    reduction: Reduction = "none",
    mode: Literal["auto", "reverse", "forward"] = "auto",
    progress: bool = True,
) -> UnrolledResponse:
    """Return N dm(θ_T)/dw_i of every test example's measurement m by the weight w_i of every training example.

    θ_T(w) is where the run ends when each batch has the loss 1/|B| sum_i w_i l_i; the derivative is taken at the
    run's own weights and is exact, the optimizer's momentum and moving averages included (Hara, Nitanda & Maehara
    2019 for plain SGD). Reverse mode goes back once for all examples, with one column for each measurement: of
    θ_{t+1} = U(θ_t, g_t), λ_t = ∂_θ Uᵀ λ_{t+1} + H_B ∂_g Uᵀ λ_{t+1}. Forward mode carries dθ_t/dw_i along, one
    column for each point, and stores nothing.

    Args:
        model: as trained by `run`; the derivative is refused where the replay does not end at its parameters.
        loss: as `train` had it: with a closed form, or any mean over examples of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: what `train(..., record=True)` returned, or a `TrainingRun`.
        points: indices of the training examples that are asked for; None: all.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        reduction: "mean" for the mean measurement alone, one row of scores.
        mode: "auto": reverse, unless there are fewer points than measurements and the loss has a closed form
            (PyTorch has no forward mode for the derivatives of some others, such as nn.HuberLoss).
        progress: show a bar of the run's steps.

    Cost: reverse three trainings, and a second backward pass of each batch for every measurement; forward one
    training, and a tangent of a gradient for every point. Memory: reverse 2 √T + 1 states, forward none; for each
    column a state, and the activations of a batch. The run's batches are part of what is differentiated, and
    are not cut; a killed call starts again.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise ValueError(f"mode must be 'auto', 'reverse' or 'forward', got {mode!r}")
    replay = Replay(model, loss, train_data, TrainingRun.of(run))
    chosen = checked_points(points, replay.num_examples)
    gradients = measured_gradients(model, loss, test, measurement=measurement, reduction=reduction)
    if mode == "auto":
        fewer = len(chosen) < len(gradients) and not output_loss(loss).twice_backward
        mode = "forward" if fewer else "reverse"
    if mode == "reverse":
        derivatives, end = weight_derivatives(replay, gradients)
        scores = derivatives[:, chosen.to(derivatives.device)]
    else:
        columns, end = displacements(replay, chosen)
        scores = gradients @ columns
    gap, states = checked_gap(replay, model, end), replay.peak_states
    origin = Origin.of(
        Problem.of(model, loss, train_data), measured=measurement is not None, curvature="the training itself"
    )
    return UnrolledResponse(replay.num_examples * scores, mode, gap, states, chosen, origin)


def checked_gap(replay: Replay, model: nn.Module, end: State) -> float:
    """Return how far the replay ends from the model, or raise a ValueError where that is not rounding."""
    trained = flatten([parameter.detach() for parameter in model.parameters() if parameter.requires_grad])
    start = replay.first_state()[0]
    gap = float((end[0] - trained).norm() / (trained - start).norm().clamp(min=torch.finfo(trained.dtype).tiny))
    if not gap <= _GAP.get(trained.dtype, 1e-2):
        raise ValueError(
            f"the replayed run ends elsewhere than the model: {gap:.2g} of the way from its start. Check that "
            "start, batches, rule and example_weights are those of this training, and that its "
            "gradients were not clipped; in float32 a long or unstable training cannot be replayed: train in "
            "float64."
        )
    return gap


def measured_gradients(
    model: nn.Module, loss: Loss, test: Data, *, measurement: Measurement | None, reduction: Reduction
) -> Tensor:
    """Return each test example's gradient, (M, P), or that of their mean, (1, P), some examples at a time."""
    if reduction not in ("none", "mean"):
        raise ValueError(f"reduction must be 'none' or 'mean', got {reduction!r}")
    problem = Problem.of(model, loss, test, batch_size=64)
    if reduction == "none":
        return per_example_gradients(problem, measurement=measurement)
    total = torch.zeros(1, problem.num_parameters, device=problem.device, dtype=problem.dtype)
    for batch in problem.data:
        total += per_example_gradients(problem.with_data(batch), measurement=measurement).sum(0)
    return total / problem.num_examples


# -------------------------------------------------------------------------------- back through the run
def weight_derivatives(replay: Replay, cotangents: Tensor) -> tuple[Tensor, State]:
    """Return dm/dw, (K, P) -> (K, N), and the state in which the run ends.

    Args:
        replay: of the run.
        cotangents: (K, P), gradients of the measurements at its end.
    """
    derivatives = cotangents.new_zeros(len(cotangents), replay.num_examples)
    columns = [cotangents, *(torch.zeros_like(cotangents) for _ in range(replay.run.rule.num_buffers))]
    end: State | None = None
    for step in progress_bar("back through the run", replay.backwards(), total=replay.run.num_steps):
        gradient, sources = replay.gradient_with_graph(step)

        def update(*arguments: Tensor, step: ReplayedStep = step) -> State:
            *state, slope = arguments
            return replay.run.rule.update(tuple(state), slope, lr=step.lr, step=step.number + 1)

        after, pull_back = vjp(update, *step.state, gradient.detach())[:2]
        end = after if end is None else end
        *columns, of_gradient = vmap(pull_back)(tuple(columns))
        *of_parameters, of_weights = _pulled_back(
            gradient, sources, of_gradient, at_once=use_vmap(replay.function, "auto", step.inputs)
        )
        columns[0] = columns[0] + flatten_columns(of_parameters).T
        derivatives.index_add_(1, step.indices.to(derivatives.device), of_weights)
    if end is None:
        raise ValueError("the run has no steps")
    return derivatives, end


def _pulled_back(
    gradient: Tensor, sources: Sequence[Tensor], cotangents: Tensor, *, at_once: bool
) -> list[Tensor]:
    """Return the derivatives of gradientᵀ c by each source, for each row c of (K, P): tensors (K, *shape)."""
    if at_once and len(cotangents) > 1:
        found = torch.autograd.grad(gradient, sources, cotangents, is_grads_batched=True, materialize_grads=True)
        return list(found)
    rows = [
        torch.autograd.grad(
            gradient, sources, row, retain_graph=index + 1 < len(cotangents), materialize_grads=True
        )
        for index, row in enumerate(cotangents)
    ]
    return [torch.stack(of_one) for of_one in zip(*rows, strict=True)]


# ----------------------------------------------------------------------------------- along the run
def displacements(replay: Replay, points: Tensor) -> tuple[Tensor, State]:
    """Return dθ_T/dw_i for each of K examples, (P, K), and the state in which the run ends.

    Cost: a training, and at each step a forward-mode derivative of the gradient for each column.
    """
    state = replay.first_state()
    tangents = tuple(vector.new_zeros(len(points), len(vector)) for vector in state)
    for number in progress_bar("along the run", range(replay.run.num_steps)):
        step = replay.step(number, state)
        # Which of the batch's weights each column moves; an example may be there twice.
        of_weights = (step.indices[None] == points[:, None]).to(step.weights)
        state, tangents = _advanced(replay, step, tangents, of_weights)
    return tangents[0].T, state


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
