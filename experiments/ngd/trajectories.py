"""Train by SGD or NGD from one start, and measure LLC, WBIC and tr(H) at checkpoints: what all targets share.

Training and every measurement of a checkpoint are units of work, so targets with equal settings share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, HessianOperator
from curvlab.lab import Run, unit
from curvlab.linalg import flatten, unflatten
from curvlab.optim import NGD, ExactNGD
from curvlab.spectrum import hutchinson_trace
from curvlab.training import (
    Learner,
    Step,
    StepInfo,
    TrainingBatch,
    evaluate,
    gradient_step,
    shuffled_batches,
    train,
)
from experiments.ngd.sampling import sampled
from experiments.shared.task import Task

ESTIMATE = ("train_loss", "validation_loss", "converged", "valid", "llc", "llc_raw", "descent", "curvature_cutoff")
DIVERGED = ("train_loss", "validation_loss", "validation_accuracy", "update_norm")  # nan where training diverged


@dataclass(frozen=True)
class Network(Task):
    """A network that several optimizers train from one start; the test set is the paper's validation set."""

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """All training examples, (inputs, targets) on the device."""
        return self.pair()

    def start(self, seed: int) -> nn.Module:
        """Return the network at the start that all optimizers share for one seed."""
        return self.build(self.generator("start", seed))


@dataclass(frozen=True)
class State:
    """A trained state to go on from.

    Attributes:
        weights, buffers: (P,), the parameters that require gradients; BatchNorm's running statistics by name.
        epoch: epochs it was trained.
        key: identifies it in the store.
    """

    weights: Tensor
    buffers: Mapping[str, Tensor]
    epoch: int
    key: Mapping[str, Any]

    def write_to(self, model: nn.Module) -> None:
        """Set a model's parameters and buffers."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter, part in zip(parameters, unflatten(self.weights, parameters), strict=True):
                parameter.copy_(part)
        model.load_state_dict(dict(self.buffers), strict=False)


# ------------------------------------------------------------------------------------ along a training
def trajectory(
    network: Network,
    optimizer: Mapping[str, Any],
    settings: DictConfig,
    seed: int,
    *,
    start: State | None = None,
    llc_epochs: Collection[int] | None = None,
) -> pd.DataFrame:
    """Train once and measure; return one row for each checkpoint.

    Columns: epoch; train_loss, validation_loss (nats, eval mode, all examples), validation_accuracy; update_norm,
    the mean over the epoch's batches of ‖Δw‖/lr; what `sampled` and `_trace` give.

    Args:
        network: data and model.
        optimizer: see `make_optimizer`.
        settings: nodes `training` (num_epochs, batch_size, checkpoints: epochs, null for each), `llc` (arguments
            of estimate_llc, see `sampled`; null: none) and `trace` (num_train, num_matvecs, rtol, max_matvecs;
            null: none).
        seed: of the start and the order of batches, both shared by the optimizers.
        start: go on from there; epochs count on, those of `settings` and `llc_epochs` from the start.
        llc_epochs: checkpoints at which the LLC is estimated; None: all. Elsewhere its columns are nan.
    """
    key, trained = _training(network, optimizer, settings, seed, start)
    model, rows = network.start(seed), []
    for index, epoch in enumerate(trained["epochs"]):
        _state(key, trained, index).write_to(model)
        row = {name: trained[name][index] for name in ("train_loss", "validation_loss", "validation_accuracy")}
        row |= {"epoch": epoch + (start.epoch if start else 0), "update_norm": trained["update_norm"][index]}
        here = key | {"epoch": epoch}
        if settings.llc is not None and (llc_epochs is None or epoch in llc_epochs):
            row |= sampled(network, model, settings.llc, key=here, seed=seed)
        if settings.trace is not None:
            row |= _trace(network.run, network, model, seed, **here, trace=settings.trace)
        rows.append(row)
    return pd.DataFrame(rows)


def trajectories(run: Run, cfg: DictConfig) -> pd.DataFrame:
    """Return the rows of `trajectory` of every task, optimizer and seed, with `num_train`, n."""
    parts = [
        trajectory(network, optimizer, network.settings, seed).assign(
            task=network.label, optimizer=str(label), seed=seed, num_train=network.num_train
        )
        for network in Network.each(run, cfg)
        for label, optimizer in network.settings.optimizers.items()
        for seed in network.settings.seeds
    ]
    run.note(seeds=list(cfg.seeds))
    return first_columns(pd.concat(parts, ignore_index=True), "task", "optimizer", "seed", "epoch")


def first_columns(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return a table whose columns begin with those of these names that it has; the others follow as they are."""
    first = [name for name in names if name in table]
    return table[first + [column for column in table if column not in first]]


def last_state(network: Network, optimizer: Mapping[str, Any], settings: DictConfig, seed: int) -> State:
    """Return the last checkpoint of that `trajectory`."""
    return _state(*_training(network, optimizer, settings, seed, None), -1)


def trained_network(
    network: Network, optimizer: Mapping[str, Any], settings: DictConfig, seed: int
) -> tuple[dict[str, Any], nn.Module]:
    """Return the model at the end of that `trajectory`, and what identifies its weights in the store."""
    key, trained = _training(network, optimizer, _with_end(settings), seed, None)
    model = network.start(seed)
    _state(key, trained, -1).write_to(model)
    return key | {"epoch": trained["epochs"][-1]}, model


def final_estimate(
    network: Network, optimizer: Mapping[str, Any], settings: DictConfig, seed: int
) -> pd.DataFrame:
    """Train to the end and measure there; return one row that says whether its estimate is an LLC.

    Columns as `trajectory` gives, and `converged`, training loss at most `converged_below`; `estimate`, from the
    minimum; `llc`, the same where training has converged and the estimate is valid, nan elsewhere. Of a training
    that diverges (`problem` says so) all numbers are nan.
    """
    epochs = settings.training.num_epochs
    try:
        row = (
            trajectory(network, optimizer, _with_end(settings), seed, llc_epochs=[epochs])
            .tail(1)
            .reset_index(drop=True)
        )
    except ArithmeticError:
        row = pd.DataFrame([dict.fromkeys(DIVERGED) | {"epoch": epochs, "valid": False, "problem": "diverged"}])
        row = row.astype(dict.fromkeys(DIVERGED, float))
    row["converged"] = row.train_loss <= settings.converged_below
    if settings.llc is not None:
        lacking = [name for name in ("llc_raw", "descent", "curvature_cutoff") if name not in row]
        row = row.assign(**dict.fromkeys(lacking, math.nan), valid=row.valid.astype(bool))
        row["estimate"] = row.get("llc", math.nan)
        row["llc"] = row.estimate.where(row.converged & row.valid)
    return row


def _with_end(settings: DictConfig) -> Any:
    """Return the settings with the end as the one checkpoint where they name none."""
    training = settings.training
    return OmegaConf.merge(settings, {"training": {"checkpoints": training.checkpoints or [training.num_epochs]}})


def _training(
    network: Network, optimizer: Mapping[str, Any], settings: DictConfig, seed: int, start: State | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what identifies a training, and what `_trained` gives of it."""
    training: Any = OmegaConf.to_container(settings.training, resolve=True)
    key = network.key | {"optimizer": dict(optimizer), "training": training, "repeat": seed}
    key |= {"start": start.key} if start else {}
    return key, _trained(network.run, network, start, **key)


@unit(
    "ngd/trained",
    version=2,
    about="training {seed_name} by {optimizer[name]} (lr {optimizer[lr]:g}), seed {repeat}",
    resumes=True,
)
def _trained(
    run: Run,
    network: Network,
    start: State | None,
    /,
    *,
    optimizer: dict[str, Any],
    training: dict[str, Any],
    repeat: int,
    checkpoint: Path,
    **_: Any,
) -> dict[str, Any]:
    """Return weights (checkpoints, P), and by name lists of buffers and of what was logged at those epochs."""
    model, loss, data = network.start(repeat), network.loss, network.train
    if start is not None:
        start.write_to(model)
    stepper, step = make_optimizer(model, loss, (data[0][:1], data[1][:1]), optimizer)
    order = network.generator("batches", repeat, *([start.epoch] if start else []))
    num_epochs, size = training["num_epochs"], training["batch_size"]
    checkpoints = training["checkpoints"] or list(range(1, num_epochs + 1))

    def measured(epoch: int, mean_loss: float) -> dict[str, Any] | None:
        if epoch + 1 not in checkpoints:
            return None
        on_train, on_test = (evaluate(model, loss, part) for part in (data, network.splits.test))
        if not math.isfinite(on_train.loss):
            raise ArithmeticError(f"{optimizer} diverged in epoch {epoch + 1}: lower its lr, or raise alpha")
        return {
            "train_loss": on_train.loss,
            "validation_loss": on_test.loss,
            "validation_accuracy": on_test.accuracy if on_test.accuracy is not None else math.nan,
            "weights": flatten(p for p in model.parameters() if p.requires_grad).detach().clone(),
            "buffers": {name: buffer.clone().cpu() for name, buffer in model.named_buffers()},
        }

    history = train(
        model,
        loss,
        data,
        num_epochs=num_epochs,
        batch_size=size,
        optimizer=stepper,
        step=step,
        batches=shuffled_batches(len(data[1]), batch_size=size, num_epochs=num_epochs, generator=order),
        measure_updates=True,
        checkpoint=checkpoint / "training.pt",
        generator=network.generator("dropout", repeat),
        progress=run.bar(f"{network.seed_name} {optimizer['name']} {repeat}"),
        on_epoch_end=measured,
    )
    records = [record for record in history.records if record]
    norms = torch.tensor(history.update_norms, dtype=torch.float64).view(num_epochs, -1) / optimizer["lr"]
    columns: dict[str, Any] = {name: [record[name] for record in records] for name in records[0]}
    return columns | {
        "epochs": list(checkpoints),
        "update_norm": [sum(norms[epoch - 1].tolist()) / norms.shape[1] for epoch in checkpoints],
        "weights": torch.stack(columns["weights"]).cpu(),
    }


def _state(key: Mapping[str, Any], trained: Mapping[str, Any], index: int) -> State:
    return State(trained["weights"][index], trained["buffers"][index], trained["epochs"][index], key)


@unit("ngd/trace", version=2, about="tr(H) of {seed_name} by {optimizer[name]}, seed {repeat}, epoch {epoch}")
def _trace(run: Run, network: Network, model: nn.Module, seed: int, /, *, trace: Any, **_: Any) -> dict[str, Any]:
    """Return tr(H) over a fixed part of the training data, by the same probes at every checkpoint."""
    settings, (inputs, targets) = dict(trace), network.train
    chosen = torch.randperm(len(targets), generator=network.generator("trace data"))
    kept = chosen[: settings.pop("num_train")].to(run.device)
    hessian = HessianOperator(model, network.loss, (inputs[kept], targets[kept]))
    found = hutchinson_trace(hessian, **settings, generator=network.generator("probes", seed))
    run.add_matvecs(found.num_matvecs)
    return {"trace": found.value, "trace_stderr": found.stderr, "trace_probes": found.num_matvecs}


# ------------------------------------------------------------------------------------ the optimizers
def make_optimizer(
    model: nn.Module, loss: nn.Module, example: tuple[Tensor, Tensor], settings: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, Step]:
    """Return an optimizer and its step, as `train` takes them.

    Args:
        model: its parameters are moved.
        loss: mean over the batch.
        example: (inputs, targets) of at least one example; exact_ngd needs one before the first batch.
        settings: `name` (sgd, ngd or exact_ngd), `lr`, and the optimizer's own. exact_ngd takes the Fisher matrix
            of each batch.
    """
    own = {key: value for key, value in settings.items() if key != "name"}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings["name"] == "exact_ngd":
        return ExactNGD(parameters, FisherOperator(model, loss, example), **own), fisher_step
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "ngd": NGD}
    if settings["name"] not in makers:
        raise ValueError(f"unknown optimizer {settings['name']!r}: choose sgd, ngd or exact_ngd")
    return makers[settings["name"]](parameters, **own), gradient_step


def fisher_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Move by (F + κI)⁻¹ ∇L_B with F and ∇L_B of the same batch; the optimizer is `ExactNGD`."""
    optimizer = learner.optimizer
    if not isinstance(optimizer, ExactNGD) or not isinstance(learner.loss.loss, nn.Module):
        raise TypeError("fisher_step needs ExactNGD and a loss module")
    fisher = FisherOperator(learner.model, learner.loss.loss, (batch.inputs, batch.targets))
    optimizer.zero_grad()
    value = learner.batch_loss(batch)
    value.backward()
    optimizer.step(fisher=fisher)
    return StepInfo(value.item())
