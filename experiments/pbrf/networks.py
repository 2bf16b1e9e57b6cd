"""Base networks: trained for K epochs, in batches that retrainings see again."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from curvlab.files import write_atomically
from curvlab.influence.retraining import DownweightedCost, FullBatchLBFGS, LeftOut, SharedBatches
from curvlab.lab import Run, task_label
from curvlab.lab.data import DataSplits, TextCorpus, token_splits, train_tokenizer
from curvlab.lab.models import build_model
from curvlab.problem import stack
from curvlab.training import TrainingDivergedError, shuffled_batches
from experiments.shared.task import LOSSES, without_paths

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SELECTED_BY = ("loss", "accuracy")
NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class Network:
    """A network at θ^s with the run that brought it there.

    Attributes:
        run: store, seeds, progress.
        label: what tables call it.
        seed: of the start, the batches and the points that are left out.
        settings: of the task.
        key: identifies it in the store.
        model: at θ^s, in eval mode, in the dtype of all retrainings.
        initial: θ⁰, (P,).
        loss: mean over examples.
        train: inputs and targets, N examples.
        test: those that are measured.
        lr: learning rate; nan with L-BFGS.
    """

    run: Run
    label: str
    seed: int
    settings: DictConfig
    key: dict[str, Any]
    model: nn.Module
    initial: Tensor
    loss: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    lr: float

    @property
    def num_epochs(self) -> int:
        """K."""
        return int(self.settings.training.get("num_epochs") or 0)

    @cached_property
    def batches(self) -> list[list[Tensor]]:
        """The batches of K + K/2 epochs, epoch by epoch."""
        return _batches(self.run, self.settings, self.seed, len(self.train[1]), self.num_epochs + self.half)

    @property
    def half(self) -> int:
        """K/2 epochs, at least one."""
        return max(1, self.num_epochs // 2)

    def left_out(self, groups: list[Tensor]) -> LeftOut:
        """Return these groups left out, with the damping and L2 of the task."""
        return LeftOut(
            self.model,
            self.loss,
            self.train,
            groups,
            damping=self.settings.damping,
            l2=self.settings.training.weight_decay,
        )

    def minimizer(self, response: str, unfinished: Path | None = None) -> Any:
        """Return what a response is minimised with: L-BFGS, or the base run's optimizer on its batches.

        The cold optimum sees the batches of K + K/2 epochs, the others those of the last K/2. The schedule goes
        on where the base run ended, so that a rate decayed by then stays decayed; momentum and Adam's averages
        start from zero at θ^s, and run through in the cold optimum alone: the warm-start gap has that in it. The
        learning rate of the Bregman responses is the base run's divided by `bregman_lr_divisor`. Unfinished work
        is kept in a folder.
        """
        training = self.settings.training
        if training.optimizer == "lbfgs":
            return FullBatchLBFGS(gradient_norm=training.gradient_norm)
        epochs = self.batches if response == "cold" else self.batches[self.num_epochs :]
        bregman = response in ("proximal_bregman", "linearised")
        first = 0 if response == "cold" else sum(map(len, self.batches[: self.num_epochs]))
        batches = [batch for epoch in epochs for batch in epoch]
        return SharedBatches(
            batches,
            lr=self.lr / (self.settings.bregman_lr_divisor if bregman else 1),
            optimizer=training.optimizer,
            momentum=training.momentum,
            schedule=_schedule(training, first, len(self.batches[0])),
            checkpoint=None if unfinished is None else unfinished / f"{response}.pt",
            progress=self.run.bar(f"{response}, {self.label}, seed {self.seed}"),
        )


def load_network(run: Run, name: str, settings: DictConfig, seed: int) -> Network:
    """Load the data, choose the learning rate, and train the network, or take what is stored.

    Args:
        run: seeds, store, device.
        name: of the task.
        settings: `data`, `model`, `training` (optimizer "sgd", "adam" or "lbfgs"; `lr` a number, or a list to
            choose from, once for all seeds, by the loss or, with `select_by: accuracy`, the accuracy on a tenth
            of the training set), `damping`, `dtype`, `num_test`; `seed_name`.
        seed: of the start, the order of batches and the points.
    """
    lr = settings.training.get("lr")
    if isinstance(lr, ListConfig):
        first = _network(run, name, settings, seed=0)
        by = settings.training.get("select_by", "loss")
        if by not in SELECTED_BY:
            raise ValueError(f"unknown training.select_by '{by}': choose one of {', '.join(SELECTED_BY)}")
        key = first.key | {"grid": list(lr), "select_by": by}
        compute = partial(_learning_rate, first, [float(rate) for rate in lr], by)
        about = f"choosing the learning rate of {first.label}"
        lr = run.unit("pbrf/learning_rate", key, compute, version=2, about=about, resumes=True)["lr"]
    network = replace(_network(run, name, settings, seed), lr=math.nan if lr is None else float(lr))
    about = f"training {network.label}, seed {seed}"
    compute = partial(_trained, network)
    stored = run.unit("pbrf/base", network.key | {"lr": lr}, compute, version=1, about=about, resumes=True)
    vector_to_parameters(stored["parameters"].to(network.initial), network.model.parameters())
    return replace(network, key=network.key | {"lr": lr})


def _network(run: Run, name: str, settings: DictConfig, seed: int) -> Network:
    """Return the network at θ⁰ with its data."""
    splits, data_key = _load_data(run, settings)
    model = build_model(
        partial(instantiate, settings.model),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("pbrf model", settings.seed_name, seed),
    )
    model = model.to(run.device, DTYPES[settings.dtype])
    order = torch.randperm(len(splits.test), generator=run.generator("pbrf test", settings.seed_name))  # type: ignore[arg-type]
    training = {k: v for k, v in without_paths(settings.training).items() if k not in ("lr", "select_by")}
    return Network(
        run,
        label=task_label(name),
        seed=seed,
        settings=settings,
        key={
            "seed_name": settings.seed_name,
            "network_seed": seed,
            "data": data_key,
            "model": without_paths(settings.model),
            "training": training,
            "dtype": settings.dtype,
        },
        model=model,
        initial=torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        loss=LOSSES[splits.task](),
        train=_tensors(splits.train, model),
        test=_tensors(splits.test, model, order[: settings.num_test]),
        lr=math.nan,
    )


def _load_data(run: Run, settings: DictConfig) -> tuple[DataSplits, dict[str, Any]]:
    splits = instantiate(settings.data)
    if not isinstance(splits, TextCorpus):
        run.record_data(splits.name, splits.checksum)
        return splits, {"checksum": splits.checksum}
    corpus = splits
    run.record_data(corpus.name, corpus.checksum)
    size = settings.tokenizer.vocabulary_size
    key = {"data": corpus.checksum, "tokenizer": {"vocabulary_size": size}}
    stored = run.unit(
        "tokenizer", key, lambda: {"json": train_tokenizer(corpus.train, vocabulary_size=size)}, version=1
    )
    length = settings.sequence_length
    return token_splits(corpus, stored["json"], sequence_length=length), key | {"sequence_length": length}


def _tensors(data: Any, model: nn.Module, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    inputs, targets = stack(data, torch.arange(len(data)) if indices is None else indices)
    like = next(model.parameters())
    moved = [t.to(like.device, like.dtype if t.is_floating_point() else None) for t in (inputs, targets)]
    return moved[0], moved[1]


def _batches(run: Run, settings: DictConfig, seed: int, size: int, num_epochs: int) -> list[list[Tensor]]:
    """Return the batches of as many epochs; the first of them do not depend on how many."""
    generator = run.generator("pbrf batches", settings.seed_name, seed)
    batch_size = settings.training.batch_size
    return [
        shuffled_batches(size, batch_size=batch_size, num_epochs=1, generator=generator) for _ in range(num_epochs)
    ]


def _schedule(training: DictConfig, first: int, steps_per_epoch: int) -> Any:
    """Return the factors of the learning rate from step `first` of the base run on."""
    epochs = training.get("decay_epochs") or []
    if not epochs:
        return "constant"
    factor = training.decay_factor
    return lambda step, num_steps: factor ** sum(first + step >= epoch * steps_per_epoch for epoch in epochs)


def _trained(network: Network, unfinished: Path) -> dict[str, Any]:
    return {"parameters": _end_of_base_run(network, unfinished).cpu()}


def _learning_rate(network: Network, grid: list[float], by: str, unfinished: Path) -> dict[str, Any]:
    """Return the rate with the lowest final loss, or the highest accuracy, on a tenth of the training set.

    The tenth is held out. Of equal accuracies the one with the lower loss is taken. Each training has its own
    checkpoint, and what has ended is not run again.
    """
    size = len(network.train[1])
    generator = network.run.generator("pbrf validation", network.settings.seed_name)
    held_out, kept = torch.randperm(size, generator=generator).split([size // 10, size - size // 10])
    inputs, targets = network.train
    own = replace(network, train=(inputs[kept], targets[kept]))
    losses, accuracies = [], []
    for lr in network.run.progress(grid, f"learning rates of {network.label}"):
        ended = unfinished / f"lr_{lr:g}.json"
        if not ended.exists():
            found = _validated(
                replace(own, lr=lr), (inputs[held_out], targets[held_out]), unfinished / f"lr_{lr:g}"
            )
            write_atomically(ended, json.dumps(found).encode())
        loss, accuracy = json.loads(ended.read_text(encoding="utf-8"))
        losses.append(loss)
        accuracies.append(accuracy)
    best = min(range(len(grid)), key=lambda i: (-accuracies[i] if by == "accuracy" else 0.0, losses[i]))
    return {"lr": grid[best], "grid": grid, "losses": losses, "accuracies": accuracies}


def _validated(network: Network, held_out: tuple[Tensor, Tensor], unfinished: Path) -> tuple[float, float]:
    """Return loss and accuracy (0 where outputs are no classes) after training; inf and 0 if that diverges."""
    try:
        end = _end_of_base_run(network, unfinished)
    except TrainingDivergedError:
        return math.inf, 0.0
    model = copy.deepcopy(network.model)
    vector_to_parameters(end, model.parameters())
    losses = LeftOut(model, network.loss, held_out, [NOTHING], damping=1.0).losses
    value, accuracy = float(losses.start_losses.mean()), 0.0
    if isinstance(network.loss, nn.CrossEntropyLoss) and held_out[1].ndim == 1:
        with torch.no_grad():
            hits = [
                (model(x).argmax(1) == y).sum() for x, y in zip(*(t.split(512) for t in held_out), strict=True)
            ]
        accuracy = float(sum(hits)) / len(held_out[1])
    return (value, accuracy) if math.isfinite(value) else (math.inf, 0.0)


def _end_of_base_run(network: Network, unfinished: Path | None = None) -> Tensor:
    """Return θ^s: the base run is the cold optimum's first K epochs, with nothing left out."""
    minimizer = network.minimizer("cold", unfinished)
    if isinstance(minimizer, SharedBatches):
        steps = sum(map(len, network.batches[: network.num_epochs]))
        minimizer = replace(minimizer, batches=minimizer.batches[:steps])
    left_out = network.left_out([NOTHING])
    objective = DownweightedCost(left_out, origin=network.initial)
    moved: Tensor = minimizer(objective, torch.zeros_like(network.initial)[None], left_out.num_examples)
    return network.initial + moved[0]
