"""The network that is trained again: its start, its batches, and both ways to train it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import runs, task_label
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.linalg import flatten
from curvlab.problem import stack
from curvlab.training import shuffled_batches, train, train_ensemble
from experiments.shared.task import LOSSES, without_paths

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Network:
    """One task in one precision.

    Attributes:
        label: what tables and figures call it.
        dtype: "float32" or "float64".
        loss: mean over examples.
        train_data: (inputs, targets).
        initial: before training.
        batches: indices of each step's examples.
        hyper: settings of the optimizer.
        key: identifies all of that in the store.
    """

    label: str
    dtype: str
    loss: nn.Module
    train_data: tuple[Tensor, Tensor]
    initial: nn.Module
    batches: list[Tensor]
    hyper: dict[str, Any]
    key: dict[str, Any]

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.train_data[1])

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.initial.parameters())

    def one_by_one(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the parameters after one training for each row of weights, (K, N) -> (K, P)."""
        rows = []
        for own in weights:
            model = copy.deepcopy(self.initial)
            batches = self.batches[:num_steps]
            train(
                model,
                self.loss,
                self.train_data,
                batches=batches,
                batch_size=len(batches[0]),
                example_weights=own,
                generator=torch.Generator(),  # not used: the batches are given
                **self.hyper,
            )
            rows.append(flatten(list(model.parameters())).detach())
        return torch.stack(rows)

    def together(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the same from one call."""
        batches = self.batches[:num_steps]
        return train_ensemble(
            self.initial,
            self.loss,
            self.train_data,
            example_weights=weights,
            num_epochs=1,  # the given batches are one
            batches=batches,
            batch_size=len(batches[0]),
            generator=torch.Generator(),
            **self.hyper,
        ).parameters


def load_network(run: runs.Run, name: str, settings: DictConfig, dtype: str) -> Network:
    """Load the data and build the network; nothing is trained yet."""
    splits: DataSplits = instantiate(settings.data)
    run.record_data(splits.name, splits.checksum)
    kind = DTYPES[dtype]
    inputs, targets = stack(splits.train, range(len(splits.train)))  # type: ignore[arg-type]  # map-style
    targets = targets.to(run.device, kind if targets.is_floating_point() else None)
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("model", settings.seed_name),
    )
    size, steps = min(settings.training.batch_size, len(targets)), settings.num_steps
    drawn = shuffled_batches(
        len(targets),
        batch_size=size,
        num_epochs=math.ceil(steps / (len(targets) // size)),
        generator=run.generator("retraining batches", settings.seed_name),
    )
    whole = [batch for batch in drawn if len(batch) == size]  # all steps cost the same
    hyper = {k: settings.training[k] for k in ("lr", "momentum", "weight_decay") if k in settings.training}
    return Network(
        label=task_label(name),
        dtype=dtype,
        loss=LOSSES[splits.task](),
        train_data=(inputs.to(run.device, kind), targets),
        initial=model.to(run.device, kind),
        batches=whole[:steps],
        hyper=hyper,
        key={
            "seed_name": settings.seed_name,
            "data": splits.checksum,
            "model": without_paths(settings.model),
            "hyper": hyper,
            "batch_size": size,
            "num_steps": steps,
            "dtype": dtype,
        },
    )
