"""A task with its network trained: what every builder of tasks gives, of images, tables and text alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from curvlab.lab import Run
from curvlab.lab.data import DataSplits, TokenSplits
from curvlab.problem.known_losses import output_loss


@dataclass(frozen=True)
class TrainedTask:
    """A network in eval mode with its data.

    Attributes:
        label: what tables and figures call it.
        seed_name: what its random streams are named after, here and in all that measures it.
        model: parameters that require gradients are the ones curvature refers to.
        loss: mean over examples, or over predicted tokens.
        splits: data with what is needed to show them.
        train: examples whose mean curvature is meant: a dataset, or a pair of tensors.
        num_train: how many.
        train_indices: (num_train,) their places in the training set.
        key: identifies the network, `train` and `seed_name` in the store, free of paths.
        num_parameters: P, those that require gradients.
        train_loss: mean over `train`.
        test_accuracy: on all test examples; None for regression.
    """

    label: str
    seed_name: str
    model: nn.Module
    loss: nn.Module
    splits: DataSplits | TokenSplits
    train: Any
    num_train: int
    train_indices: Tensor
    key: dict[str, Any]
    num_parameters: int
    train_loss: float
    test_accuracy: float | None

    @property
    def is_language(self) -> bool:
        """Whether the examples are sequences of tokens."""
        return isinstance(self.splits, TokenSplits)

    @property
    def predictions_per_example(self) -> float:
        """Mean number of predicted tokens of a sequence, 1 for other data: what the LiSSA paper's |B| counts."""
        return output_loss(self.loss).count(self.train[1]) / self.num_train if self.is_language else 1.0

    @property
    def tensor_sizes(self) -> list[int]:
        """P_1, ..., P_L: the sizes of the parameter tensors that curvature refers to."""
        return [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]


def curvature_indices(run: Run, splits: DataSplits | TokenSplits, num: int | None) -> Tensor:
    """Return the places of the training examples that the curvature is the mean over: `num` at random, or all."""
    indices = torch.arange(len(splits.train))  # type: ignore[arg-type]  # map-style
    if num is None or num >= len(indices):
        return indices
    order = torch.randperm(len(indices), generator=run.generator("curvature_train", splits.name))
    return order[:num].sort().values


def without_paths(node: Any) -> Any:
    """Return a config node as plain values, files by their names: where they lie changes no number."""
    if OmegaConf.is_config(node):
        return without_paths(OmegaConf.to_container(node, resolve=True))
    if isinstance(node, dict):
        return {key: without_paths(value) for key, value in node.items()}
    if isinstance(node, list):
        return [without_paths(value) for value in node]
    return PurePath(node).name if isinstance(node, str) and "/" in node else node
