"""Seconds of single steps, and their medians and ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.lab import runs, t_interval
from curvlab.optim import NGD
from curvlab.optim.axis_fisher import fitting_rank
from experiments.benchmarks.ngd_step.parts import parts_table
from experiments.benchmarks.timing import kernel_threads, wall_clock

OPTIMIZERS = ("sgd", "adam", "adam-fused", "products", "floor", "ngd")
_WARM_UP = 12  # calls: the ten first updates, and on to a multiple of 4


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each model, repeat and optimizer, their means, also by rank, and a step's parts."""
    table = pd.concat([_model_table(run, str(name), cfg) for name in cfg.models], ignore_index=True)
    return {"table": table, "summary": summary_table(table), "ranks": _rank_table(run, cfg)} | {
        "parts": parts_table(run, cfg)
    }


def _rank_table(run: runs.Run, cfg: DictConfig) -> pd.DataFrame:
    """Return `summary_table` of `ranks.model` for each of `ranks.values`, rank being the largest of an axis."""
    parts = []
    for rank in cfg.ranks["values"]:
        own = OmegaConf.merge(cfg, {"ngd": {"rank": rank}, "num_repeats": cfg.ranks.num_repeats})
        summary = summary_table(_model_table(run, str(cfg.ranks.model), own))  # type: ignore[arg-type]  # a mapping
        parts.append(summary.assign(rank=rank))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["rank"])


def _model_table(run: runs.Run, name: str, cfg: DictConfig) -> pd.DataFrame:
    """Return one row for each repeat and optimizer."""
    key = {
        "model": OmegaConf.to_container(cfg.models[name], resolve=True),
        "ngd": OmegaConf.to_container(cfg.ngd, resolve=True),
        "num_threads": cfg.num_threads,
        "num_periods": cfg.num_periods,
        "device": run.device.type,
    }
    rows: list[dict[str, Any]] = []
    for repeat in run.progress(range(cfg.num_repeats), name):
        measure = partial(_timed, run, cfg, name, repeat)
        about = f"steps of {name}, repeat {repeat}"
        times = run.unit("benchmarks/ngd_step", key | {"repeat": repeat}, measure, version=2, about=about)
        shared = {"model": name, "parameters": times["num_parameters"], "repeat": repeat}
        for optimizer in OPTIMIZERS:
            periods = np.asarray(times[optimizer])  # (periods, steps), seconds
            ratio = float(np.median(periods.mean(1) / np.asarray(times["adam"]).mean(1)))
            row = {
                "optimizer": optimizer,
                "milliseconds": 1e3 * float(np.median(periods.mean(1))),
                "to_adam": ratio,
            }
            update = {"first_of_period": 1e3 * float(np.median(periods[:, 0]))} | {
                "others": 1e3 * float(np.median(periods[:, 1:])) if periods.shape[1] > 1 else np.nan
            }
            rows.append(shared | row | update)
    return pd.DataFrame(rows)


def _timed(run: runs.Run, cfg: DictConfig, name: str, repeat: int) -> dict[str, Any]:
    """Return seconds of each step, (periods, update_period), by optimizer."""
    period = int(cfg.ngd.update_period)
    makers: dict[str, Callable[[Any], torch.optim.Optimizer | _Products]] = {
        "sgd": partial(torch.optim.SGD, lr=1e-3),
        "adam": partial(torch.optim.Adam, lr=1e-3),
        "adam-fused": partial(torch.optim.Adam, lr=1e-3, fused=True),
        "products": partial(_Products, rank=cfg.ngd.rank, update_period=period),
        "floor": partial(_Products, rank=cfg.ngd.rank, update_period=period, decompositions=True),
        "ngd": partial(NGD, lr=1e-3, **dict(cfg.ngd)),
    }
    with kernel_threads(cfg.num_threads):
        model: nn.Module = instantiate(cfg.models[name]).to(run.device)
        generator = run.generator("gradients", name, repeat)
        for parameter in model.parameters():
            parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=generator).to(run.device)
        optimizers = {label: make(model.parameters()) for label, make in makers.items()}
        for label, optimizer in optimizers.items():
            for _ in range(-(-_WARM_UP // period) * period if label in ("ngd", "products", "floor") else 2):
                optimizer.step()
        times: dict[str, list[list[float]]] = {label: [] for label in makers}
        for _ in range(cfg.num_periods):
            for label, optimizer in optimizers.items():
                times[label].append([_seconds(optimizer, wall_clock(run.device)) for _ in range(period)])
    return {**times, "num_parameters": sum(parameter.numel() for parameter in model.parameters())}


class _Products:
    """The products H = XWᵀ, X - HW and, in every update_period-th call, HᵀX for all axes longer than 16.

    With decompositions also, in those calls, the eigendecompositions of the (rank, rank) matrices of all axes,
    those of one rank at once, in double precision, as NGD takes them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        rank: int | None,
        update_period: int,
        decompositions: bool = False,
    ) -> None:
        tensors = list(parameters)
        ranks = Counter(fitting_rank(size, rank) for tensor in tensors for size in tensor.shape if size > 1)
        self._grams = [
            torch.randn(count, size, size, dtype=torch.float64, device=tensors[0].device)
            for size, count in (ranks.items() if decompositions else ())
        ]
        storage = torch.ones(max(tensor.numel() for tensor in tensors), device=tensors[0].device)
        self._axes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            for dim in (size for size in tensor.shape if size > 16):
                factor = torch.full((fitting_rank(dim, rank), dim), 1e-4, device=tensor.device)
                self._axes.append((storage[: tensor.numel()].view(-1, dim), factor))
        self._update_period, self._calls = update_period, 0

    def step(self) -> None:
        updating = self._calls % self._update_period == 0
        for x, factor in self._axes:
            hidden = x @ factor.T
            if updating:
                _ = hidden.T @ x
            x.addmm_(hidden, factor, alpha=-1)
        if updating:
            for gram in self._grams:
                torch.linalg.eigh(gram)
        self._calls += 1


def _seconds(optimizer: torch.optim.Optimizer | _Products, now: Callable[[], float]) -> float:
    start = now()
    optimizer.step()
    return now() - start


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return means over repeats with 95 % t intervals."""
    rows = []
    for (model, optimizer), own in table.groupby(["model", "optimizer"], sort=False):
        row: dict[str, Any] = {"model": model, "parameters": own.parameters.iloc[0], "optimizer": optimizer}
        for column in ("milliseconds", "to_adam"):
            interval = t_interval(own[column].to_numpy(), unit="repeats")
            row |= {column: own[column].mean(), f"{column}_low": interval.low, f"{column}_high": interval.high}
        row |= {"first_of_period": own.first_of_period.mean(), "others": own.others.mean()}
        rows.append(row)
    return pd.DataFrame(rows)
