"""Train by SGD or NGD from one start, and measure LLC, WBIC and tr(H) at checkpoints: what all targets share.

Training and every measurement of a checkpoint are units of work, so targets with equal settings share them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.curvature import HessianOperator
from curvlab.lab import Run
from curvlab.linalg import flatten, unflatten
from curvlab.spectrum import hutchinson_trace
from curvlab.training import evaluate, shuffled_batches, train
from experiments.ngd.optimizers import make_optimizer
from experiments.ngd.sampling import sampled
from experiments.ngd.task import Task

DIVERGED = ("train_loss", "validation_loss", "validation_accuracy", "update_norm")  # nan where training diverged


@dataclass(frozen=True)
class Start:
    """A trained state to go on from.

    Attributes:
        weights, buffers: (P,), the parameters that require gradients; BatchNorm's running statistics by name.
        epoch: epochs it was trained.
        key: identifies it in the store.
    """

    weights: Tensor
    buffers: dict[str, Tensor]
    epoch: int
    key: dict[str, Any]


def trajectory(
    run: Run,
    task: Task,
    optimizer: Mapping[str, Any],
    cfg: DictConfig,
    seed: int,
    *,
    start: Start | None = None,
    llc_epochs: Collection[int] | None = None,
) -> pd.DataFrame:
    """Train once and measure; return one row for each checkpoint.

    Columns: epoch; train_loss, validation_loss (nats, eval mode, all examples), validation_accuracy; update_norm,
    the mean over the epoch's batches of ‖Δw‖/lr; what `sampled` and `_trace` give.

    Args:
        run: seeds, store, device.
        task: data and model.
        optimizer: see `make_optimizer`.
        cfg: nodes `training` (num_epochs, batch_size, checkpoints: epochs, null for each), `llc` (arguments of
            estimate_llc, see `sampled`; null: none) and `trace` (num_train, num_matvecs, rtol, max_matvecs; null:
            none).
        seed: of the start and the order of batches, both shared by the optimizers.
        start: go on from there; epochs count on, those of `cfg` and `llc_epochs` from the start.
        llc_epochs: checkpoints at which the LLC is estimated; None: all. Elsewhere its columns are nan.
    """
    key, trained = _trained_unit(run, task, optimizer, cfg, seed, start=start)
    model = task.build(run, seed)
    what, rows = _described(task, optimizer, seed), []
    for index, epoch in enumerate(trained["epochs"]):
        _set_state(model, *_state(trained, index))
        row = {name: trained[name][index] for name in ("train_loss", "validation_loss", "validation_accuracy")}
        row |= {"epoch": epoch + (start.epoch if start else 0), "update_norm": trained["update_norm"][index]}
        here = key | {"epoch": epoch}
        if cfg.llc is not None and (llc_epochs is None or epoch in llc_epochs):
            about = f"{what}, epoch {row['epoch']}"
            row |= sampled(run, task, model, cfg.llc, key=here, seed=seed, about=about)
        if cfg.trace is not None:
            row |= run.unit(
                "ngd/trace",
                here | _plain(cfg, "trace"),
                partial(_trace, run, task, model, cfg, seed),
                version=1,
                about=f"tr(H) of {what}, epoch {row['epoch']}",
            )
        rows.append(row)
    return pd.DataFrame(rows)


def last_state(run: Run, task: Task, optimizer: Mapping[str, Any], cfg: DictConfig, seed: int) -> Start:
    """Return the last checkpoint of that `trajectory`."""
    key, trained = _trained_unit(run, task, optimizer, cfg, seed, start=None)
    return Start(*_state(trained, -1), epoch=trained["epochs"][-1], key=key)


def _trained_unit(
    run: Run, task: Task, optimizer: Mapping[str, Any], cfg: DictConfig, seed: int, *, start: Start | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {str(key): value for key, value in optimizer.items()}
    training: dict[str, Any] = OmegaConf.to_container(cfg.training, resolve=True)  # type: ignore[assignment]
    key = task.key | {"optimizer": settings, "training": training, "repeat": seed}
    key |= {"start": start.key} if start else {}
    compute = partial(_trained, run, task, settings, training, seed, start=start)
    about = f"training {_described(task, optimizer, seed)}"
    return key, run.unit("ngd/trained", key, compute, version=1, about=about, resumes=True)


def _described(task: Task, optimizer: Mapping[str, Any], seed: int) -> str:
    return f"{task.name} by {optimizer['name']} (lr {optimizer['lr']:g}), seed {seed}"


def final_estimate(
    run: Run,
    task: Task,
    optimizer: Mapping[str, Any],
    cfg: DictConfig,
    seed: int,
) -> pd.DataFrame:
    """Train to the end and measure there; return one row that says whether its estimate is an LLC.

    Columns as `trajectory` gives, and `converged`, training loss at most `cfg.converged_below`; `estimate`, from
    the minimum; `llc`, the same where training has converged and the estimate is valid, nan elsewhere. Of a
    training that diverges (`problem` says so) all numbers are nan.
    """
    epochs = cfg.training.num_epochs
    last = OmegaConf.merge(cfg, {"training": {"checkpoints": cfg.training.checkpoints or [epochs]}})
    try:
        row = trajectory(run, task, optimizer, last, seed, llc_epochs=[epochs])  # type: ignore[arg-type]  # a mapping
        row = row.tail(1).reset_index(drop=True)
    except ArithmeticError:
        row = pd.DataFrame([dict.fromkeys(DIVERGED) | {"epoch": epochs, "valid": False, "problem": "diverged"}])
        row = row.astype(dict.fromkeys(DIVERGED, float))
    row = row.assign(
        **{name: math.nan for name in ("llc_raw", "descent", "curvature_cutoff") if cfg.llc and name not in row}
    )
    row["converged"] = row.train_loss <= cfg.converged_below
    if cfg.llc is not None:
        row["valid"] = row.valid.astype(bool)
        row["estimate"] = row.get("llc", math.nan)
        row["llc"] = row.estimate.where(row.converged & row.valid)
    return row


def _plain(cfg: DictConfig, node: str) -> dict[str, Any]:
    return {node: OmegaConf.to_container(cfg[node], resolve=True)}


def _trained(  # noqa: PLR0917
    run: Run,
    task: Task,
    optimizer: dict[str, Any],
    training: dict[str, Any],
    seed: int,
    unfinished: Path,
    *,
    start: Start | None,
) -> dict[str, Any]:
    """Return weights (checkpoints, P), and by name lists of buffers and of what was logged at those epochs."""
    model, loss = task.build(run, seed), task.loss
    if start is not None:
        _set_state(model, start.weights, start.buffers)
    stepper, step = make_optimizer(model, loss, (task.train[0][:1], task.train[1][:1]), optimizer)
    order = run.generator("batches", task.name, seed, *([start.epoch] if start else []))
    num_epochs, size = training["num_epochs"], training["batch_size"]
    checkpoints = training["checkpoints"] or list(range(1, num_epochs + 1))

    def measured(epoch: int, mean_loss: float) -> dict[str, Any] | None:
        if epoch + 1 not in checkpoints:
            return None
        on_train, on_test = (evaluate(model, loss, data) for data in (task.train, task.splits.test))
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
        task.train,
        num_epochs=num_epochs,
        batch_size=size,
        optimizer=stepper,
        step=step,
        batches=shuffled_batches(len(task.train[1]), batch_size=size, num_epochs=num_epochs, generator=order),
        measure_updates=True,
        checkpoint=unfinished / "training.pt",
        generator=run.generator("dropout", task.name, seed),
        progress=run.bar(f"{task.name} {optimizer['name']} {seed}"),
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


def _state(trained: Mapping[str, Any], index: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights (P,) and buffers of one checkpoint; a unit of an older version has none."""
    return trained["weights"][index], trained["buffers"][index] if "buffers" in trained else {}


def _set_state(model: nn.Module, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, part in zip(parameters, unflatten(weights, parameters), strict=True):
            parameter.copy_(part)
    model.load_state_dict(dict(buffers), strict=False)


def _trace(run: Run, task: Task, model: nn.Module, cfg: DictConfig, seed: int) -> dict[str, Any]:
    """Return tr(H) over a fixed part of the training data, by the same probes at every checkpoint."""
    settings = dict(cfg.trace)
    chosen = torch.randperm(len(task.train[1]), generator=run.generator("trace data", task.name))
    kept = chosen[: settings.pop("num_train")].to(run.device)
    hessian = HessianOperator(model, task.loss, (task.train[0][kept], task.train[1][kept]))
    trace = hutchinson_trace(hessian, **settings, generator=run.generator("probes", task.name, seed))
    run.add_matvecs(trace.num_matvecs)
    return {"trace": trace.value, "trace_stderr": trace.stderr, "trace_probes": trace.num_matvecs}
