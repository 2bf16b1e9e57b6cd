"""The data of a race: what trains, what chooses the settings and the epoch, and what is held out from both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from curvlab.lab import Run, task_label
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.problem import stack
from experiments.shared.task import without_paths

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RaceTask:
    """Images, and a network by its config.

    Attributes:
        label: what tables and figures call it.
        seed_name: what its random streams are named after.
        train: (inputs, targets) that gradients are taken of, on the device.
        validation: a part of the training set, at random, that chooses settings and epochs.
        test: the data's own test set, which chooses nothing.
        num_outputs: classes.
        model: Hydra node.
        augment: whether training images are cropped and flipped.
        batch_size: in examples.
        key: identifies all of this in the store.
    """

    label: str
    seed_name: str
    train: Pair
    validation: Pair
    test: Pair
    num_outputs: int
    model: DictConfig
    augment: bool
    batch_size: int
    key: dict[str, Any]

    def build(self, run: Run, seed: int | str) -> nn.Module:
        """Return the network at the start that all optimizers of a seed share."""
        return build_model(
            partial(instantiate, self.model),
            input_shape=self.train[0].shape[1:],
            num_outputs=self.num_outputs,
            generator=run.generator("start", self.seed_name, seed),
        ).to(run.device)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches of a pass."""
        return -(-len(self.train[1]) // batch_size)


def load_race_task(run: Run, name: str, settings: DictConfig) -> RaceTask:
    """Load the data and set the validation part aside.

    Args:
        run: seeds, device.
        name: of the task in the config.
        settings: of one task, see `task_settings`: nodes `data`, `model`; `seed_name`; `pooling`: images are
            averaged over squares of so many pixels (null: left as they are); `num_validation`; `augment`;
            `batch_size`.
    """
    splits: DataSplits = instantiate(settings.data)
    run.record_data(splits.name, splits.checksum)
    order = torch.randperm(len(splits.train), generator=run.generator("validation", settings.seed_name))  # type: ignore[arg-type]  # map-style
    held_out, kept = order[: settings.num_validation], order[settings.num_validation :]

    def examples(part: Any, indices: Tensor) -> Pair:
        inputs, targets = stack(part, indices)
        if settings.get("pooling"):
            inputs = avg_pool2d(inputs, settings.pooling)
        return inputs.to(run.device), targets.to(run.device)

    return RaceTask(
        label=task_label(name),
        seed_name=settings.seed_name,
        train=examples(splits.train, kept),
        validation=examples(splits.train, held_out),
        test=examples(splits.test, torch.arange(len(splits.test))),  # type: ignore[arg-type]  # map-style
        num_outputs=splits.num_outputs,
        model=settings.model,
        augment=settings.augment,
        batch_size=settings.batch_size,
        key={
            "seed_name": settings.seed_name,
            "data": splits.checksum,
            "pooling": settings.get("pooling"),
            "num_validation": settings.num_validation,
            "model": without_paths(settings.model),
            "augment": settings.augment,
        },
    )
