"""Base networks: trained for K epochs, in batches that retrainings see again."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from curvlab.influence.retraining import DownweightedCost, FullBatchLBFGS, LeftOut, SharedBatches
from curvlab.lab import Run, unit
from curvlab.training import TrainingDivergedError, shuffled_batches
from experiments.shared.task import DTYPES, Task, files_by_name

SELECTED_BY = ("loss", "accuracy")
NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class Network(Task):
    """A task's network at θ^s with the run that brought it there.

    Attributes:
        seed: of the start, the batches and the points that are left out.
        network_key: identifies it in the store.
        model: at θ^s, in eval mode, in the dtype of all retrainings.
        initial: θ⁰, (P,).
        train: inputs and targets, N examples.
        test: those that are measured.
        lr: learning rate; nan with L-BFGS.
    """

    seed: int
    network_key: dict[str, Any]
    model: nn.Module
    initial: Tensor
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    lr: float

    @property
    def key(self) -> dict[str, Any]:
        """Identifies it in the store."""
        return self.network_key

    @property
    def described(self) -> str:
        """For the terminal."""
        return f"{self.label}, seed {self.seed}"

    @property
    def num_epochs(self) -> int:
        """K."""
        return int(self.settings.training.get("num_epochs") or 0)

    @property
    def half(self) -> int:
        """K/2 epochs, at least one."""
        return max(1, self.num_epochs // 2)

    @cached_property
    def batches(self) -> list[list[Tensor]]:
        """The batches of K + K/2 epochs, epoch by epoch; the first of them do not depend on how many."""
        size, generator = len(self.train[1]), self.generator("pbrf batches", self.seed)
        batch_size = self.settings.training.batch_size
        return [
            shuffled_batches(size, batch_size=batch_size, num_epochs=1, generator=generator)
            for _ in range(self.num_epochs + self.half)
        ]

    def left_out(self, groups: list[Tensor]) -> LeftOut:
        """Return these groups left out, with the damping and L2 of the task."""
        l2 = self.settings.training.weight_decay
        return LeftOut(self.model, self.loss, self.train, groups, damping=self.settings.damping, l2=l2)

    def minimizer(self, response: str, unfinished: Path | None = None) -> Any:
        """Return what a response is minimised with: L-BFGS, or the base run's optimizer on its batches.

        The cold optimum sees the batches of K + K/2 epochs, the others those of the last K/2. The schedule goes
        on where the base run ended, so that a rate decayed by then stays decayed; momentum and Adam's averages
        start from zero at θ^s, and run through in the cold optimum alone: the warm-start gap has that in it. The
        learning rate of the Bregman responses, and of slow_warm, is the base run's divided by
        `bregman_lr_divisor`. Unfinished work is kept in a folder.
        """
        training = self.settings.training
        if training.optimizer == "lbfgs":
            return FullBatchLBFGS(gradient_norm=training.gradient_norm)
        epochs = self.batches if response == "cold" else self.batches[self.num_epochs :]
        bregman = response in ("proximal_bregman", "linearised", "slow_warm")
        first = 0 if response == "cold" else sum(map(len, self.batches[: self.num_epochs]))
        return SharedBatches(
            [batch for epoch in epochs for batch in epoch],
            lr=self.lr / (self.settings.bregman_lr_divisor if bregman else 1),
            optimizer=training.optimizer,
            momentum=training.momentum,
            schedule=self._schedule(first),
            checkpoint=None if unfinished is None else unfinished / f"{response}.pt",
            progress=self.run.bar(f"{response}, {self.described}"),
        )

    def length(self, response: str) -> float:
        """Return the length of a descent, the sum of its learning rates over 1 - momentum; nan unless by SGD.

        Along a direction of curvature μ it goes 1 - exp(-length (μ + λ)) of the way to a quadratic's minimum.
        """
        minimizer = self.minimizer(response)
        if not isinstance(minimizer, SharedBatches) or minimizer.optimizer != "sgd":
            return math.nan
        steps, schedule = len(minimizer.batches), minimizer.schedule
        factors = [schedule(step, steps) for step in range(steps)] if callable(schedule) else [1.0] * steps
        return minimizer.lr * sum(factors) / (1 - minimizer.momentum)

    def end_of_base_run(self, unfinished: Path | None = None) -> Tensor:
        """Return θ^s: the base run is the cold optimum's first K epochs, with nothing left out."""
        minimizer = self.minimizer("cold", unfinished)
        if isinstance(minimizer, SharedBatches):
            steps = sum(map(len, self.batches[: self.num_epochs]))
            minimizer = replace(minimizer, batches=minimizer.batches[:steps])
        objective = DownweightedCost(self.left_out([NOTHING]), origin=self.initial)
        moved: Tensor = minimizer(objective, torch.zeros_like(self.initial)[None], len(self.train[1]))
        return self.initial + moved[0]

    def _schedule(self, first: int) -> Any:
        """Return the factors of the learning rate from step `first` of the base run on."""
        training, steps = self.settings.training, len(self.batches[0])
        epochs, factor = training.get("decay_epochs") or [], training.get("decay_factor")
        if not epochs:
            return "constant"
        return lambda step, num_steps: factor ** sum(first + step >= epoch * steps for epoch in epochs)


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
    task, lr = Task.load(run, name, settings), settings.training.get("lr")
    if isinstance(lr, ListConfig):
        by = settings.training.get("select_by", "loss")
        if by not in SELECTED_BY:
            raise ValueError(f"unknown training.select_by '{by}': choose one of {', '.join(SELECTED_BY)}")
        lr = _learning_rate(_at_start(task, seed=0), grid=list(lr), select_by=by)["lr"]
    network = replace(_at_start(task, seed), lr=math.nan if lr is None else float(lr))
    stored = _base(network, lr=lr)
    vector_to_parameters(stored["parameters"].to(network.initial), network.model.parameters())
    return replace(network, network_key=network.key | {"lr": lr})


@unit("pbrf/base", version=1, about="training {seed_name}, seed {network_seed}", resumes=True)
def _base(network: Network, /, *, checkpoint: Path, **_: Any) -> dict[str, Any]:
    return {"parameters": network.end_of_base_run(checkpoint).cpu()}


def _at_start(task: Task, seed: int) -> Network:
    """Return the network at θ⁰ with its data."""
    settings, dtype = task.settings, DTYPES[task.settings.dtype]
    model = task.build(task.generator("pbrf model", seed), dtype=dtype)
    order = torch.randperm(len(task.splits.test), generator=task.generator("pbrf test"))  # type: ignore[arg-type]
    training = {k: v for k, v in files_by_name(settings.training).items() if k not in ("lr", "select_by")}
    return Network(
        **vars(task),
        seed=seed,
        network_key=task.key | {"network_seed": seed, "training": training, "dtype": settings.dtype},
        model=model,
        initial=parameters_to_vector(model.parameters()).detach().clone(),
        train=task.pair(dtype=dtype),
        test=task.pair("test", order[: settings.num_test], dtype=dtype),
        lr=math.nan,
    )


@unit("pbrf/learning_rate", version=2, about="choosing the learning rate of {seed_name}")
def _learning_rate(network: Network, /, *, grid: list[float], select_by: str, **_: Any) -> dict[str, Any]:
    """Return the rate with the lowest final loss, or the highest accuracy, on a tenth of the training set.

    The tenth is held out. Of equal accuracies the one with the lower loss is taken.
    """
    size, grid = len(network.train[1]), [float(rate) for rate in grid]
    order = torch.randperm(size, generator=network.generator("pbrf validation"))
    held_out, kept = order.split([size // 10, size - size // 10])
    inputs, targets = network.train
    own, held = replace(network, train=(inputs[kept], targets[kept])), (inputs[held_out], targets[held_out])
    rates = network.run.progress(grid, f"learning rates of {network.label}")
    found = [_validated(replace(own, lr=lr), held, lr=lr) for lr in rates]
    losses, accuracies = ([each[name] for each in found] for name in ("loss", "accuracy"))
    best = min(range(len(grid)), key=lambda i: (-accuracies[i] if select_by == "accuracy" else 0.0, losses[i]))
    return {"lr": grid[best], "grid": grid, "losses": losses, "accuracies": accuracies}


@unit("pbrf/validated", version=1, about="training {seed_name} at a learning rate of {lr:g}", resumes=True)
def _validated(
    network: Network, held_out: tuple[Tensor, Tensor], /, *, checkpoint: Path, **_: Any
) -> dict[str, float]:
    """Return `loss` and `accuracy` (0 where outputs are no classes) after training; inf and 0 if that diverges."""
    diverged = {"loss": math.inf, "accuracy": 0.0}
    try:
        end = network.end_of_base_run(checkpoint)
    except TrainingDivergedError:
        return diverged
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
    return {"loss": value, "accuracy": accuracy} if math.isfinite(value) else diverged
