"""Retraining many networks at once against one by one: seconds, their ratio, and whether they end the same.

Whatever is compared is timed in the same repeat, turn about, and a ratio is that of one repeat. A repeat takes so
many steps as the config says, not the whole training: every step does the same work. Seconds are CPU seconds of
this process, on one thread, after a first step that is not counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.influence import random_halves, subset_weights
from curvlab.lab import Computed, Run, unit
from curvlab.lab.claims import ClaimResult, ClaimSheet, exact
from curvlab.lab.claims import judge as verdict
from curvlab.linalg import flatten
from curvlab.training import shuffled_batches, train, train_ensemble
from experiments.benchmarks.parts import tasks_of
from experiments.shared.gauges import LayerProducts, kernel_threads, work_clock
from experiments.shared.stats import in_columns, mean
from experiments.shared.task import DTYPES, Task

LEFT_OUT, HALVES = "points left out", "random halves"


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return ratios over repeats, the seconds of each repeat, and what a step costs at least."""
    timing: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    with kernel_threads(1):
        for task in tasks_of(run, cfg, "retraining"):
            for dtype in task.settings.dtypes:
                network = Retrained.of(task, dtype)
                timing += _left_out(network)
                timing += _halves(network) if task.settings.num_halves is not None else []
                floors.append(_floors(network))
    if not timing:
        return {}
    repeats = pd.DataFrame(timing)
    return {"retraining": summary(repeats), "retraining_timing": repeats, "floors": pd.DataFrame(floors)}


@dataclass(frozen=True)
class Retrained(Task):
    """A task in one precision, to be trained in one order of whole batches.

    Attributes:
        dtype: "float32" or "float64".
        train: (inputs, targets).
        initial: before training.
        batches: indices of each step's examples.
    """

    dtype: str
    train: tuple[Tensor, Tensor]
    initial: nn.Module
    batches: list[Tensor]

    @classmethod
    def of(cls, task: Task, dtype: str) -> Retrained:
        """Draw the batches and build the network; nothing is trained yet."""
        size, steps = min(task.settings.training.batch_size, task.num_train), task.settings.num_steps
        epochs, generator = math.ceil(steps / (task.num_train // size)), task.generator("retraining batches")
        drawn = shuffled_batches(task.num_train, batch_size=size, num_epochs=epochs, generator=generator)
        whole = [batch for batch in drawn if len(batch) == size]  # all steps cost the same
        train_data, kind = task.pair("train", dtype=DTYPES[dtype]), DTYPES[dtype]
        initial = task.build(task.generator("model"), dtype=kind)
        return Retrained(**vars(task), dtype=dtype, train=train_data, initial=initial, batches=whole[:steps])

    @property
    def key(self) -> dict[str, Any]:
        """Identifies all of that in the store."""
        own = {"hyper": self.hyper, "batch_size": len(self.batches[0]), "num_steps": self.settings.num_steps}
        return super().key | {"data": self.splits.checksum, "dtype": self.dtype} | own

    @property
    def hyper(self) -> dict[str, Any]:
        """Settings of the optimizer."""
        of = self.settings.training
        return {name: of[name] for name in ("lr", "momentum", "weight_decay") if name in of}

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.initial.parameters())

    def one_by_one(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the parameters after one training for each row of weights, (K, N) -> (K, P)."""
        rows = []
        for own in weights:
            model = copy.deepcopy(self.initial)
            train(model, self.loss, self.train, example_weights=own, **self._steps(num_steps))
            rows.append(flatten(list(model.parameters())).detach())
        return torch.stack(rows)

    def together(self, weights: Tensor, *, num_steps: int | None = None) -> Tensor:
        """Return the same from one call."""
        once = self._steps(num_steps) | {"num_epochs": 1}  # the given batches are one
        return train_ensemble(self.initial, self.loss, self.train, example_weights=weights, **once).parameters

    def _steps(self, num_steps: int | None) -> dict[str, Any]:
        given = {"batches": self.batches[:num_steps], "batch_size": len(self.batches[0])}
        return self.hyper | given | {"generator": torch.Generator()}  # not used: the batches are given


# ------------------------------------------------------------------------------------ turns
def _left_out(network: Retrained) -> list[dict[str, Any]]:
    """Return the seconds of trainings without one point each, one by one and together."""
    points = torch.randperm(network.num_train, generator=network.generator("left out"))
    points = points[: network.settings.num_left_out]
    weights = torch.ones(len(points), network.num_train)
    weights[torch.arange(len(points)), points] = 0.0
    return _repeats(network, LEFT_OUT, weights, single=weights)


def _halves(network: Retrained) -> list[dict[str, Any]]:
    """Return the seconds of trainings on random halves together, and of one training on everything."""
    number, generator = network.settings.num_halves, network.generator("halves")
    halves = random_halves(network.num_train, number, generator=generator)
    return _repeats(network, HALVES, subset_weights(halves).float(), single=torch.ones(1, network.num_train))


def _repeats(network: Retrained, what: str, weights: Tensor, *, single: Tensor) -> list[dict[str, Any]]:
    asked = {"what": what, "copies": len(weights)}
    row = {"task": network.label, "dtype": network.dtype} | asked | {"parameters": network.num_parameters}
    row |= {"steps": len(network.batches), "batch_size": len(network.batches[0])}
    repeats = range(network.settings.num_repeats)
    return [row | {"repeat": r} | _turn(network, weights, single, **asked, repeat=r) for r in repeats]


@unit("retraining/turn", version=1, about="{what}, {seed_name}, {dtype}, repeat {repeat}")
def _turn(network: Retrained, weights: Tensor, single: Tensor, /, *, repeat: int, **_: Any) -> dict[str, Any]:
    """Return seconds of both ways, and how far the parameters that both trained are apart."""
    network.one_by_one(single[:1], num_steps=1)  # what PyTorch loads for a first step is no training's
    network.together(weights, num_steps=1)
    ways = {"one_by_one": partial(network.one_by_one, single), "together": partial(network.together, weights)}
    order = list(ways) if repeat % 2 == 0 else list(ways)[::-1]
    seconds, ends, clock = {}, {}, work_clock(network.run.device)
    for way in order:
        start = clock()
        ends[way] = ways[way]()
        seconds[f"seconds_{way}"] = clock() - start
    same = len(single) == len(weights)
    # Where one training stands for many halves there is nothing to compare but a training on one of them.
    compared = ends["one_by_one"] if same else network.one_by_one(weights[:1])
    difference = float((compared - ends["together"][: len(compared)]).abs().max())
    moved = float((ends["together"] - flatten(network.initial.parameters()).detach()).abs().max())
    return seconds | {"difference": difference, "moved": moved}


# ------------------------------------------------------------------------------------ floors
def _floors(network: Retrained) -> dict[str, Any]:
    """Return milliseconds of one copy's share of a step: products in a loop, batched, the update."""
    asked = {"copies": network.settings.num_left_out, "num_floor_steps": network.settings.num_floor_steps}
    names = {"task": network.label, "dtype": network.dtype, "copies": asked["copies"]}
    return names | {f"{name} ms": 1000 * seconds for name, seconds in _floor(network, **asked).items()}


@unit("retraining/floor", version=1, about="floor of {seed_name}, {dtype}")
def _floor(network: Retrained, /, *, copies: int, num_floor_steps: int, **_: Any) -> dict[str, float]:
    return floor_seconds(network, copies, clock=work_clock(network.run.device), num_steps=num_floor_steps)


def floor_seconds(
    network: Retrained, num_copies: int, *, clock: Callable[[], float], num_steps: int
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


# ------------------------------------------------------------------------------------ tables
def summary(repeats: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each network and comparison, with ratios and their t intervals over repeats.

    `ratio` is one by one over together for points left out; for halves it is together over one training.
    """
    rows = []
    for names, own in repeats.groupby(["task", "dtype", "what"], sort=False):
        ratio = ratios(own)
        row = dict(zip(("task", "dtype", "what"), names, strict=True))
        row |= {name: own[name].iloc[0] for name in ("copies", "parameters", "steps", "batch_size")}
        row |= dict(zip(("ms one step one by one", "ms one step together, each"), _milliseconds(own), strict=True))
        row |= in_columns("ratio", ratio, unit="repeats", joint=" ") | {"repeats": len(own)}
        rows.append(row | {"largest difference": own.difference.max(), "largest move": own.moved.max()})
    return pd.DataFrame(rows)


def _milliseconds(own: pd.DataFrame) -> tuple[float, float]:
    """Return those of a step of one copy, by itself and together with the others: medians over repeats."""
    singly = own.copies if own.what.iloc[0] == LEFT_OUT else 1
    single, together = own.seconds_one_by_one / own.steps / singly, own.seconds_together / own.steps / own.copies
    return 1000 * single.median(), 1000 * together.median()


def ratios(own: pd.DataFrame) -> pd.Series:
    """Return the ratio of each repeat of one comparison."""
    if own.what.iloc[0] == LEFT_OUT:
        return own.seconds_one_by_one / own.seconds_together
    return own.seconds_together / own.seconds_one_by_one


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("faster-together", "same-parameters", "timed-halves")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each network in each precision; intervals are over repeats."""
    results, floors = [], computed["floors"]
    for (task, dtype, what), own in computed["retraining_timing"].groupby(["task", "dtype", "what"], sort=False):
        claim = claims.claim(CLAIMS[0] if what == LEFT_OUT else CLAIMS[2], of=f"{task}-{dtype}")
        floor = floors[(floors["task"] == task) & (floors["dtype"] == dtype)].iloc[0]
        found = mean(ratios(own), unit="repeats")
        results.append(verdict(claim, *found, if_not_reproduced=_reason(own, floor)))
        if dtype == "float64" and what == LEFT_OUT:
            largest = float(own.difference.max())
            reason = f"The parameters have moved by up to {own.moved.max():.2g}."
            same = claims.claim("same-parameters", of=str(task))
            results.append(verdict(same, largest, exact(largest), if_not_reproduced=reason))
    lacking = [name for name in CLAIMS if not any(result.claim.id.startswith(name) for result in results)]
    return results + [claims.unjudged(name, "This preset has no such comparison.") for name in lacking]


def _reason(own: pd.DataFrame, floor: pd.Series) -> str:
    """Return what a step of one copy takes, and what its arithmetic alone would."""
    single, together = _milliseconds(own)
    least = floor["batched_products ms"] + floor["update ms"]
    best = single / least if own.what.iloc[0] == LEFT_OUT else own.copies.iloc[0] * least / single
    return (
        f"A step takes {single:.3g} ms by itself and {together:.3g} ms for each network together; its matrix "
        f"products and the update alone, batched, are {least:.3g} ms: a ratio of {best:.3g} at best."
    )
