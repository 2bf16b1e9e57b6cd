"""Both ways timed side by side, and compared in their parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import random_halves, subset_weights
from curvlab.lab import runs, t_interval, task_settings
from experiments.benchmarks.gauges import kernel_threads, load_average, work_clock
from experiments.benchmarks.retraining.floor import floor_seconds
from experiments.benchmarks.retraining.network import Network, load_network

LEFT_OUT, HALVES = "points left out", "random halves"


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return ratios over repeats, the seconds of each repeat, and what a step costs at least."""
    timing: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    with kernel_threads(1):
        for name, settings in task_settings(cfg).items():
            for dtype in settings.dtypes:
                measured = _Measured(run, load_network(run, name, settings, dtype), settings)
                timing += measured.left_out()
                if settings.num_halves is not None:
                    timing += measured.halves()
                floors.append(measured.floors())
    run.note(
        seconds="CPU seconds of one process" if run.device.type == "cpu" else "seconds",
        threads=1,
        load_average=load_average(),
    )
    repeats = pd.DataFrame(timing)
    return {"table": summary(repeats), "timing": repeats, "floors": pd.DataFrame(floors)}


class _Measured:
    """The units of one network: one for each repeat of each comparison."""

    def __init__(self, run: runs.Run, network: Network, settings: DictConfig) -> None:
        self.run, self.network, self.settings = run, network, settings
        self.clock = work_clock(run.device)

    def left_out(self) -> list[dict[str, Any]]:
        """Return the seconds of trainings without one point each, one by one and together."""
        generator = self.run.generator("left out", self.settings.seed_name)
        points = torch.randperm(self.network.num_train, generator=generator)[: self.settings.num_left_out]
        weights = torch.ones(len(points), self.network.num_train)
        weights[torch.arange(len(points)), points] = 0.0
        return self._repeats(LEFT_OUT, weights, single=weights)

    def halves(self) -> list[dict[str, Any]]:
        """Return the seconds of trainings on random halves together, and of one training on everything."""
        generator = self.run.generator("halves", self.settings.seed_name)
        halves = random_halves(self.network.num_train, self.settings.num_halves, generator=generator)
        return self._repeats(HALVES, subset_weights(halves).float(), single=torch.ones(1, self.network.num_train))

    def _repeats(self, what: str, weights: Tensor, *, single: Tensor) -> list[dict[str, Any]]:
        network, rows = self.network, []
        key = network.key | {"what": what, "copies": len(weights)}
        for repeat in range(self.settings.num_repeats):
            measure = partial(self._turn, weights, single, repeat)
            about = f"{what}, {network.label}, {network.dtype}, repeat {repeat + 1}"
            found = self.run.unit("retraining/turn", key | {"repeat": repeat}, measure, version=1, about=about)
            names = {"task": network.label, "dtype": network.dtype, "what": what, "copies": len(weights)}
            size = {"parameters": network.num_parameters, "steps": len(network.batches)}
            rows.append(names | size | {"batch_size": len(network.batches[0]), "repeat": repeat} | found)
        return rows

    def _turn(self, weights: Tensor, single: Tensor, repeat: int) -> dict[str, Any]:
        """Return seconds of both ways, and how far the parameters that both trained are apart."""
        network = self.network
        network.one_by_one(single[:1], num_steps=1)  # what PyTorch loads for a first step is no training's
        network.together(weights, num_steps=1)
        ways = {"one_by_one": partial(network.one_by_one, single), "together": partial(network.together, weights)}
        order = list(ways) if repeat % 2 == 0 else list(ways)[::-1]
        seconds, ends = {}, {}
        for way in order:
            start = self.clock()
            ends[way] = ways[way]()
            seconds[f"seconds_{way}"] = self.clock() - start
        same = len(single) == len(weights)
        # Where one training stands for many halves there is nothing to compare but a training on one of them.
        compared = ends["one_by_one"] if same else network.one_by_one(weights[:1])
        difference = float((compared - ends["together"][: len(compared)]).abs().max())
        moved = float((ends["together"] - _flat(network)).abs().max())
        return seconds | {"difference": difference, "moved": moved}

    def floors(self) -> dict[str, Any]:
        """Return milliseconds of one copy's share of a step: products in a loop, batched, the update."""
        network, copies = self.network, self.settings.num_left_out
        measure: Callable[..., dict[str, float]] = partial(
            floor_seconds, network, copies, clock=self.clock, num_steps=self.settings.num_floor_steps
        )
        key = network.key | {"copies": copies, "num_floor_steps": self.settings.num_floor_steps}
        about = f"floor of {network.label}, {network.dtype}"
        found = self.run.unit("retraining/floor", key, measure, version=1, about=about)
        names = {"task": network.label, "dtype": network.dtype, "copies": copies}
        return names | {f"{name} ms": 1000 * seconds for name, seconds in found.items()}


def _flat(network: Network) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.initial.parameters()])


def summary(repeats: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each network and comparison, with ratios and their t intervals over repeats.

    `ratio` is one by one over together for points left out; for halves it is together over one training.
    """
    rows = []
    for names, own in repeats.groupby(["task", "dtype", "what"], sort=False):
        ratio = ratios(own)
        interval = t_interval(ratio, unit="repeats")
        shared = {name: own[name].iloc[0] for name in ("copies", "parameters", "steps", "batch_size")}
        trained_singly = own.copies if names[2] == LEFT_OUT else 1
        rows.append(
            dict(zip(("task", "dtype", "what"), names, strict=True))
            | shared
            | {
                "ms one step one by one": 1000 * (own.seconds_one_by_one / own.steps / trained_singly).median(),
                "ms one step together, each": 1000 * (own.seconds_together / own.steps / own.copies).median(),
                "ratio": ratio.mean(),
                "ratio low": interval.low,
                "ratio high": interval.high,
                "repeats": len(own),
                "largest difference": own.difference.max(),
                "largest move": own.moved.max(),
            }
        )
    return pd.DataFrame(rows)


def ratios(own: pd.DataFrame) -> pd.Series:
    """Return the ratio of each repeat of one comparison."""
    if own.what.iloc[0] == LEFT_OUT:
        return own.seconds_one_by_one / own.seconds_together
    return own.seconds_together / own.seconds_one_by_one
