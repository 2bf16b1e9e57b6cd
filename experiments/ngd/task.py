"""What the optimizers of the NGD paper are compared on: data, and the start of a network for each seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.lab import Run
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.problem import stack


@dataclass(frozen=True)
class Task:
    """Data and a model's shape.

    Attributes:
        name: what seeds the start.
        splits: training and test set; the test set stands for the paper's validation set.
        train, loss: (inputs, targets) on the device, and the mean over examples.
        model, key: Hydra node of the model; what identifies data, model and name in the store.
    """

    name: str
    splits: DataSplits
    train: tuple[Tensor, Tensor]
    model: DictConfig
    loss: nn.Module
    key: dict[str, Any]

    def build(self, run: Run, seed: int) -> nn.Module:
        """Return the model at the start that all optimizers share for one seed."""
        return build_model(
            partial(instantiate, self.model),
            input_shape=self.splits.input_shape,
            num_outputs=self.splits.num_outputs,
            generator=run.generator("start", self.name, seed),
        ).to(run.device)


def load_task(run: Run, data: DictConfig, model: DictConfig, name: str) -> Task:
    """Load the data and describe the model."""
    splits: DataSplits = instantiate(data)
    run.record_data(splits.name, splits.checksum)
    inputs, targets = stack(splits.train, torch.arange(len(splits.train)))  # type: ignore[arg-type]
    key = {"name": name, "data": splits.checksum, "model": OmegaConf.to_container(model, resolve=True)}
    return Task(name, splits, (inputs.to(run.device), targets.to(run.device)), model, nn.CrossEntropyLoss(), key)
