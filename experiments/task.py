"""The trained model that a target examines: data, model and training from one part of the config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.data import DataSplits, stack
from curvlab.models import build_model, freeze
from curvlab.runs import Run
from curvlab.training import evaluate, train


@dataclass(frozen=True)
class Task:
    """A model in eval mode with its data.

    Attributes:
        name: label in tables and figures.
        model: parameters that require gradients are the ones curvature refers to.
        loss: mean over examples.
        splits: normalised data with what is needed to show them.
        train: examples whose mean curvature is meant: a dataset, or a pair of tensors.
        num_train: how many.
        train_indices: (num_train,) their places in the training set.
        key: identifies the trained model and `train` in the store, free of paths.
        num_parameters: P, those that require gradients.
        train_loss: mean training loss.
        test_accuracy: on all test examples; None for regression.
    """

    name: str
    model: nn.Module
    loss: nn.Module
    splits: DataSplits
    train: Any
    num_train: int
    train_indices: Tensor
    key: dict[str, Any]
    num_parameters: int
    train_loss: float
    test_accuracy: float | None


LOSSES = {"classification": nn.CrossEntropyLoss, "binary": nn.BCEWithLogitsLoss, "regression": nn.MSELoss}


def build_task(run: Run, cfg: DictConfig) -> Task:
    """Load the data, build the model, train it or take the stored weights, and freeze what the config says.

    Args:
        run: seeds, store, device and progress.
        cfg: `name`, a label; nodes `data`, `model`, `training` (null: the model comes with its weights) and
            `freeze`; `curvature_train`, how many training examples, drawn at random, the curvature is the mean
            over (null: all).
    """
    splits: DataSplits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    device = run.device
    model = build_model(
        partial(instantiate, cfg.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("model", cfg.name),
    ).to(device)
    loss = LOSSES[splits.task]()
    key: dict[str, Any] = {
        "data": {"checksum": splits.checksum},
        "model": without_paths(cfg.model),
        "training": without_paths(cfg.training),
    }
    if cfg.training is not None:
        stored = run.unit("trained_model", key, partial(_trained, run, model, loss, splits.train, cfg))
        model.load_state_dict({parameter: value.to(device) for parameter, value in stored["weights"].items()})
    model.eval()
    num_parameters = freeze(model, normalization=cfg.freeze.normalization, biases=cfg.freeze.biases)
    train_data: Any = splits.train
    indices = torch.arange(len(train_data))
    if cfg.curvature_train is not None and cfg.curvature_train < len(indices):
        order = torch.randperm(len(indices), generator=run.generator("curvature_train", splits.name))
        indices = order[: cfg.curvature_train].sort().values
        train_data = stack(splits.train, indices)
    key |= {"freeze": without_paths(cfg.freeze), "curvature_train": len(indices)}
    measured = run.unit("evaluation", key, partial(_evaluated, model, loss, train_data, splits))
    return Task(
        name=cfg.name,
        model=model,
        loss=loss,
        splits=splits,
        train=train_data,
        num_train=len(indices),
        train_indices=indices,
        key=key,
        num_parameters=num_parameters,
        train_loss=measured["train_loss"],
        test_accuracy=measured["test_accuracy"],
    )


def _trained(run: Run, model: nn.Module, loss: nn.Module, data: Any, cfg: DictConfig) -> dict[str, Any]:
    settings = dict(cfg.training)
    history = train(
        model,
        loss,
        data,
        **{str(setting): value for setting, value in settings.items()},
        generator=run.generator("training", cfg.name),
        progress=partial(run.progress, description=f"train {cfg.name}"),
    )
    weights: dict[str, Tensor] = model.state_dict()
    return {"weights": weights, "losses": list(history.losses)}


def _evaluated(model: nn.Module, loss: nn.Module, train_data: Any, splits: DataSplits) -> dict[str, Any]:
    return {
        "train_loss": evaluate(model, loss, train_data).loss,
        "test_accuracy": evaluate(model, loss, splits.test).accuracy,
    }


def without_paths(node: Any) -> Any:
    """Return a config node as plain values, files by their names: where they lie changes no number."""
    if OmegaConf.is_config(node):
        return without_paths(OmegaConf.to_container(node, resolve=True))
    if isinstance(node, dict):
        return {key: without_paths(value) for key, value in node.items()}
    if isinstance(node, list):
        return [without_paths(value) for value in node]
    return PurePath(node).name if isinstance(node, str) and "/" in node else node
