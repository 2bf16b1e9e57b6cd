"""Back through a training run: measurements' derivatives by all weights at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vjp, vmap

from curvlab.curvature.linearise import use_vmap
from curvlab.linalg import flatten_columns
from curvlab.training import Replay, ReplayedStep
from curvlab.training.history import State


def weight_derivatives(replay: Replay, cotangents: Tensor) -> tuple[Tensor, State]:
    """Return dm/dw, (K, P) -> (K, N), and the state in which the run ends.

    Args:
        replay: of the run.
        cotangents: (K, P), gradients of the measurements at its end.
    """
    derivatives = cotangents.new_zeros(len(cotangents), replay.num_examples)
    columns = [cotangents, *(torch.zeros_like(cotangents) for _ in range(replay.run.rule.num_buffers))]
    end: State | None = None
    for step in replay.backwards():
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
