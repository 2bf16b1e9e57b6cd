"""Along a training run: how far a few examples' weights move its end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from curvlab.curvature.linearise import use_vmap
from curvlab.linalg import flatten, unflatten
from curvlab.training import Replay, ReplayedStep
from curvlab.training.history import State


def displacements(replay: Replay, points: Tensor) -> tuple[Tensor, State]:
    """Return dθ_T/dw_i for each of K examples, (P, K), and the state in which the run ends.

    Cost: a training, and at each step a forward-mode derivative of the gradient for each column.
    """
    state = replay.first_state()
    tangents = tuple(vector.new_zeros(len(points), len(vector)) for vector in state)
    for number in range(replay.run.num_steps):
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
