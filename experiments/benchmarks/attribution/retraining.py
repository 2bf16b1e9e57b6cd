"""Retraining many networks at once against one by one: seconds, their ratio, and whether they end the same.

Whatever is compared is timed in the same repeat, turn about, and a ratio is that of one repeat. A repeat takes so
many steps as the config says, not the whole training: every step does the same work. Seconds are CPU seconds of
this process, on one thread, after a first step that is not counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.influence import random_halves, subset_weights
from curvlab.lab import Computed, Run
from curvlab.lab.claims import ClaimResult, ClaimSheet, exact, t_interval
from curvlab.lab.claims import judge as verdict
from curvlab.linalg import flatten
from curvlab.training import shuffled_batches, train, train_ensemble
from experiments.shared.gauges import LayerProducts, kernel_threads, work_clock
from experiments.shared.stats import in_columns
from experiments.shared.task import DTYPES, Task

LEFT_OUT, HALVES = "points left out", "random halves"


def compute(run: Run, tasks: Mapping[str, DictConfig]) -> dict[str, pd.DataFrame]:
    """Return ratios over repeats, the seconds of each repeat, and what a step costs at least."""
    timing: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    with kernel_threads(1):
        for name, settings in tasks.items():
            for dtype in settings.dtypes:
                measured = _Measured(run, load_network(run, name, settings, dtype), settings)
                timing += measured.left_out()
                if settings.num_halves is not None:
                    timing += measured.halves()
                floors.append(measured.floors())
    if not timing:
        return {}
    repeats = pd.DataFrame(timing)
    return {"retraining": summary(repeats), "retraining_timing": repeats, "floors": pd.DataFrame(floors)}


class _Measured:
    """The units of one network: one for each repeat of each comparison."""

    def __init__(self, run: Run, network: Network, settings: DictConfig) -> None:
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
        shared = {name: own[name].iloc[0] for name in ("copies", "parameters", "steps", "batch_size")}
        trained_singly = own.copies if names[2] == LEFT_OUT else 1
        rows.append(
            dict(zip(("task", "dtype", "what"), names, strict=True))
            | shared
            | {
                "ms one step one by one": 1000 * (own.seconds_one_by_one / own.steps / trained_singly).median(),
                "ms one step together, each": 1000 * (own.seconds_together / own.steps / own.copies).median(),
                **in_columns("ratio", ratio, unit="repeats", joint=" "),
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


@dataclass(frozen=True)
class Network:
    """One task in one precision.

    Attributes:
        label: what tables and figures call it.
        dtype: "float32" or "float64".
        loss: mean over examples.
        train_data: (inputs, targets).
        initial: before training.
        batches: indices of each step's examples.
        hyper: settings of the optimizer.
        key: identifies all of that in the store.
    """

    label: str
    dtype: str
    loss: nn.Module
    train_data: tuple[Tensor, Tensor]
    initial: nn.Module
    batches: list[Tensor]
    hyper: dict[str, Any]
    key: dict[str, Any]

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.train_data[1])

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.initial.parameters())

    def one_by_one(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the parameters after one training for each row of weights, (K, N) -> (K, P)."""
        rows = []
        for own in weights:
            model = copy.deepcopy(self.initial)
            batches = self.batches[:num_steps]
            train(
                model,
                self.loss,
                self.train_data,
                batches=batches,
                batch_size=len(batches[0]),
                example_weights=own,
                generator=torch.Generator(),  # not used: the batches are given
                **self.hyper,
            )
            rows.append(flatten(list(model.parameters())).detach())
        return torch.stack(rows)

    def together(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the same from one call."""
        batches = self.batches[:num_steps]
        return train_ensemble(
            self.initial,
            self.loss,
            self.train_data,
            example_weights=weights,
            num_epochs=1,  # the given batches are one
            batches=batches,
            batch_size=len(batches[0]),
            generator=torch.Generator(),
            **self.hyper,
        ).parameters


def load_network(run: Run, name: str, settings: DictConfig, dtype: str) -> Network:
    """Load the data and build the network; nothing is trained yet."""
    task, kind = Task.load(run, name, settings), DTYPES[dtype]
    size, steps = min(settings.training.batch_size, task.num_train), settings.num_steps
    drawn = shuffled_batches(
        task.num_train,
        batch_size=size,
        num_epochs=math.ceil(steps / (task.num_train // size)),
        generator=task.generator("retraining batches"),
    )
    whole = [batch for batch in drawn if len(batch) == size]  # all steps cost the same
    hyper = {k: settings.training[k] for k in ("lr", "momentum", "weight_decay") if k in settings.training}
    counted = {"hyper": hyper, "batch_size": size, "num_steps": steps, "dtype": dtype}
    return Network(
        label=task.label,
        dtype=dtype,
        loss=task.loss,
        train_data=task.pair("train", dtype=kind),
        initial=task.build(task.generator("model"), dtype=kind),
        batches=whole[:steps],
        hyper=hyper,
        key=task.key | {"data": task.splits.checksum} | counted,
    )


def floor_seconds(
    network: Network, num_copies: int, *, clock: Callable[[], float], num_steps: int
) -> dict[str, float]:
    """Return seconds of one copy's share of a step: products in a loop, batched products, the update.

    The update is SGD with momentum, of as many parameters as all copies have.
    """
    products = LayerProducts(network.initial, len(network.batches[0]), num_copies)
    like = products.inputs
    moved = torch.zeros(num_copies, network.num_parameters, dtype=like.dtype, device=like.device)
    moved.grad = torch.zeros_like(moved)
    stepper = torch.optim.SGD([moved], lr=0.1, momentum=network.hyper.get("momentum", 0.0))
    found = {}
    works = {"products": products.in_a_loop, "batched_products": products.batched, "update": stepper.step}
    for name, work in works.items():
        work()
        start = clock()
        for _ in range(num_steps):
            work()
        found[name] = (clock() - start) / num_steps / num_copies
    return found


CLAIMS = ("faster-together", "same-parameters", "timed-halves")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each network in each precision; intervals are over repeats."""
    results, floors = [], computed["floors"]
    for (task, dtype, what), own in computed["retraining_timing"].groupby(["task", "dtype", "what"], sort=False):
        of, values = f"{task}-{dtype}", ratios(own)
        claim = claims.claim(CLAIMS[0] if what == LEFT_OUT else CLAIMS[2], of=of)
        floor = floors[(floors["task"] == task) & (floors["dtype"] == dtype)].iloc[0]
        reason = _reason(own, floor)
        interval = t_interval(values, unit="repeats")
        results.append(verdict(claim, float(values.mean()), interval, if_not_reproduced=reason))
        if dtype == "float64" and what == LEFT_OUT:
            largest = float(own.difference.max())
            reason = f"The parameters have moved by up to {own.moved.max():.2g}."
            same = claims.claim("same-parameters", of=str(task))
            results.append(verdict(same, largest, exact(largest), if_not_reproduced=reason))
    judged = {result.claim.id for result in results}
    return results + [
        claims.unjudged(name, "This preset has no such comparison.")
        for name in CLAIMS
        if not any(identity.startswith(name) for identity in judged)
    ]


def _reason(own: pd.DataFrame, floor: pd.Series) -> str:
    """Return what a step of one copy takes, and what its arithmetic alone would."""
    singly = own.copies if own.what.iloc[0] == LEFT_OUT else 1
    single = 1000 * (own.seconds_one_by_one / own.steps / singly).median()
    together = 1000 * (own.seconds_together / own.steps / own.copies).median()
    least = floor["batched_products ms"] + floor["update ms"]
    best = single / least if own.what.iloc[0] == LEFT_OUT else own.copies.iloc[0] * least / single
    return (
        f"A step takes {single:.3g} ms by itself and {together:.3g} ms for each network together; its matrix "
        f"products and the update alone, batched, are {least:.3g} ms: a ratio of {best:.3g} at best."
    )
