"""The gradients that Ginger and QNG see along a training run, in coordinates of their own span."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.lab import Run, unit
from curvlab.linalg import flatten
from curvlab.training import curvature_step, train
from experiments.shared.task import Task

CHUNK = 2**16  # parameters that are factorised at a time


@dataclass(frozen=True)
class Stream:
    """Gradients of one training run; n <= their number, or the network's parameters where those are fewer.

    Attributes:
        name: of the task.
        seed: of the start, the order of batches and the drawn labels.
        sampled: d_1, ..., d_T of Eq. 8, (T, n), double precision.
        checkpoints: the steps t (from 1) at which matrices are compared.
        losses: the gradients of the batch's loss at these steps, (len(checkpoints), n).
        num_parameters: P.
        key: identifies them in the store.
    """

    name: str
    seed: int
    sampled: Tensor
    checkpoints: tuple[int, ...]
    losses: Tensor
    num_parameters: int
    key: dict[str, Any]


class StreamTask(Task):
    """A network and data; reads `stream` of the settings: num_steps, batch_size, lr, momentum, checkpoints."""

    def stream(self, seed: int) -> Stream:
        """Train by SGD with `curvature_step`, and return what an optimizer with a curvature would have seen.

        Every matrix that the two optimizers or their targets make of these gradients is a multiple of the identity
        outside their span, so that coordinates in an orthonormal basis of it lose nothing: inner products, and so
        all norms and errors, are those of all P parameters. Ginger (one matrix for all parameters) and QNG compute
        with inner products alone: they do the same in these coordinates.
        """
        key = self.key | {"stream": self.settings.stream, "repeat": seed}
        checkpoints = tuple(self.settings.stream.checkpoints)
        return Stream(self.label, seed, checkpoints=checkpoints, key=key, **_recorded(self.run, self, **key))


@unit("ginger/stream", version=2, about="gradients of {seed_name}, seed {repeat}")
def _recorded(run: Run, task: StreamTask, /, *, stream: Any, repeat: int, **_: Any) -> dict[str, Any]:
    model = task.build(task.generator("start", repeat))
    settings = {"lr": stream.lr, "momentum": stream.momentum, "checkpoints": stream.checkpoints}
    recorder = Recorder(model.parameters(), **settings)
    train(
        model,
        nn.CrossEntropyLoss(),
        task.splits.train,
        num_steps=stream.num_steps,
        batch_size=stream.batch_size,
        optimizer=recorder,
        step=curvature_step,
        generator=task.generator("batches", repeat),
    )
    found = coordinates(torch.stack([*recorder.sampled, *recorder.losses])).cpu()
    return {
        "sampled": found[: len(recorder.sampled)],
        "losses": found[len(recorder.sampled) :],
        "num_parameters": len(recorder.sampled[0]),
    }


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients of sampled labels, and those of the loss at the checkpoints."""

    def __init__(self, params: Any, *, lr: float, momentum: float, checkpoints: Collection[int]) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.sampled: list[Tensor] = []
        self.losses: list[Tensor] = []
        self._checkpoints = checkpoints

    def update_curvature(self) -> None:
        """Keep the gradient."""
        self.sampled.append(self._gradient())

    def step(self, closure: Any = None) -> Any:
        """Take SGD's step."""
        if len(self.sampled) in self._checkpoints:
            self.losses.append(self._gradient())
        return super().step(closure)

    def _gradient(self) -> Tensor:
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        return flatten(parameter.grad.detach() for parameter in members)


def coordinates(vectors: Tensor) -> Tensor:
    """Return (V, n) with the inner products of `vectors`, (V, P), n = min(V, P). Cost: 2 P V² flops.

    The triangle R of a QR factorisation, found chunk by chunk: the basis itself is not needed.
    """
    triangle = vectors.new_zeros(0, len(vectors), dtype=torch.float64)
    for chunk in vectors.split(CHUNK, dim=1):
        triangle = torch.linalg.qr(torch.cat([triangle, chunk.T.double()]), mode="r").R
    return triangle.T.contiguous()
