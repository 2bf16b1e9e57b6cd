"""The gradients that Ginger and QNG see along a training run, in coordinates of their own span."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.lab import Run, task_label
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.linalg import flatten
from curvlab.training import curvature_step, train

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


def gradient_stream(run: Run, name: str, settings: DictConfig, seed: int) -> Stream:
    """Train by SGD with `curvature_step`, and return what an optimizer with a curvature would have seen.

    Every matrix that the two optimizers or their targets make of these gradients is a multiple of the identity
    outside their span, so that coordinates in an orthonormal basis of it lose nothing: inner products, and so all
    norms and errors, are those of all P parameters. Ginger (one matrix for all parameters) and QNG compute with
    inner products alone: they do the same in these coordinates.

    Args:
        run: seeds, store, device.
        name: of the task.
        settings: of the task: `data`, `model`, `seed_name`, `stream` (num_steps, batch_size, lr, momentum,
            checkpoints).
        seed: of this run.
    """
    splits: DataSplits = instantiate(settings.data)
    run.record_data(splits.name, splits.checksum)
    stream: dict[str, Any] = OmegaConf.to_container(settings.stream, resolve=True)  # type: ignore[assignment]
    key = {
        "name": settings.seed_name,
        "data": splits.checksum,
        "model": OmegaConf.to_container(settings.model, resolve=True),
        "stream": stream,
        "repeat": seed,
    }
    stored = run.unit(
        "ginger/stream",
        key,
        partial(_recorded, run, splits, settings, stream, seed),
        version=1,
        about=f"gradients of {task_label(name)}, seed {seed}",
    )
    return Stream(
        name=task_label(name),
        seed=seed,
        sampled=stored["sampled"],
        checkpoints=tuple(stream["checkpoints"]),
        losses=stored["losses"],
        num_parameters=stored["num_parameters"],
        key=key,
    )


def _recorded(
    run: Run, splits: DataSplits, settings: DictConfig, stream: dict[str, Any], seed: int
) -> dict[str, Any]:
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("start", settings.seed_name, seed),
    ).to(run.device)
    recorder = Recorder(
        model.parameters(), lr=stream["lr"], momentum=stream["momentum"], checkpoints=stream["checkpoints"]
    )
    train(
        model,
        nn.CrossEntropyLoss(),
        splits.train,
        num_steps=stream["num_steps"],
        batch_size=stream["batch_size"],
        optimizer=recorder,
        step=curvature_step,
        generator=run.generator("batches", settings.seed_name, seed),
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
