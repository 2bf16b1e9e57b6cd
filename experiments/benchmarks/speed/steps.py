"""Time of one optimizer step: NGD against Adam and SGD, its Fisher updates included, and what it is made of."""

from __future__ import annotations

import time
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
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, unit
from curvlab.lab import judge as verdict
from curvlab.optim import NGD
from curvlab.optim.ngd import fitting_rank
from experiments.shared import stats
from experiments.shared.gauges import kernel_threads, wall_clock

OPTIMIZERS = ("sgd", "adam", "adam-fused", "products", "floor", "ngd")
_WARM_UP = 12  # calls: the ten first updates, and on to a multiple of 4

PARTS = ("products", "double products", "eigendecompositions", "element by element", "views")
RATIOS = {"to_adam": "milliseconds", "arithmetic_to_adam": "arithmetic"}
_PRODUCTS = {"bmm", "baddbmm", "mm", "addmm"}
_VIEWS = {"view", "transpose", "permute", "unsqueeze", "expand"}  # in another shape
_VIEWS |= {"slice", "select", "split", "unbind", "as_strided"}  # of a part

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each model, repeat and optimizer, their means, also by rank, and a step's parts."""
    own: dict[str, Any] = OmegaConf.to_container(cfg.steps, resolve=True)  # type: ignore[assignment]
    own["num_threads"] = cfg.num_threads
    table = pd.concat([_model_table(run, name, own) for name in own["models"]], ignore_index=True)
    tables = {"steps": table, "step_summary": _summary(table)}
    if ranks := own["ranks"]["values"]:
        tables["step_ranks"] = pd.concat([_of_rank(run, rank, own) for rank in ranks], ignore_index=True)
    if own["parts"]["models"]:
        rows = [row for name in own["parts"]["models"] for row in _part_rows(run, name, own)]
        tables["step_parts"] = pd.DataFrame(rows)
    return tables


def _of_rank(run: Run, rank: int, own: dict[str, Any]) -> pd.DataFrame:
    """Return `_summary` of `ranks.model` where no axis has a larger rank."""
    settings = own | {"ngd": own["ngd"] | {"rank": rank}, "num_repeats": own["ranks"]["num_repeats"]}
    return _summary(_model_table(run, own["ranks"]["model"], settings)).assign(rank=rank)


# ------------------------------------------------------------------------------------ whole steps
def _model_table(run: Run, name: str, own: dict[str, Any]) -> pd.DataFrame:
    """Return one row for each repeat and optimizer."""
    key = {"model": own["models"][name]} | {part: own[part] for part in ("ngd", "num_threads", "num_periods")}
    key["device"] = run.device.type
    rows: list[dict[str, Any]] = []
    for repeat in run.progress(range(own["num_repeats"]), name):
        times = _timed(run, name, **key, repeat=repeat)
        adam = np.asarray(times["adam"]).mean(1)
        for optimizer in OPTIMIZERS:
            periods = 1e3 * np.asarray(times[optimizer])  # (periods, steps), milliseconds
            row = {"model": name, "parameters": times["num_parameters"], "repeat": repeat, "optimizer": optimizer}
            row["milliseconds"] = float(np.median(periods.mean(1)))
            row["to_adam"] = float(np.median(periods.mean(1) / (1e3 * adam)))
            row["first_of_period"] = float(np.median(periods[:, 0]))
            row["others"] = float(np.median(periods[:, 1:])) if periods.shape[1] > 1 else np.nan
            rows.append(row)
    return pd.DataFrame(rows)


@unit("benchmarks/ngd_step", version=2, about="steps of {model[_target_]}, repeat {repeat}")
def _timed(run: Run, name: str, /, *, repeat: int, **own: Any) -> dict[str, Any]:
    """Return seconds of each step, (periods, update_period), by optimizer."""
    ngd, period = own["ngd"], int(own["ngd"]["update_period"])
    products = partial(_Products, rank=ngd["rank"], update_period=period)
    makers: dict[str, Callable[[Any], torch.optim.Optimizer | _Products]] = {
        "sgd": partial(torch.optim.SGD, lr=1e-3),
        "adam": partial(torch.optim.Adam, lr=1e-3),
        "adam-fused": partial(torch.optim.Adam, lr=1e-3, fused=True),
        "products": products,
        "floor": partial(products, decompositions=True),
        "ngd": partial(NGD, lr=1e-3, **ngd),
    }
    now = wall_clock(run.device)
    with kernel_threads(own["num_threads"]):
        model = _with_gradients(own["model"], run.generator("gradients", name, repeat), run.device)
        optimizers = {label: make(model.parameters()) for label, make in makers.items()}
        for label, optimizer in optimizers.items():
            for _ in range(-(-_WARM_UP // period) * period if label in ("ngd", "products", "floor") else 2):
                optimizer.step()
        times: dict[str, list[list[float]]] = {label: [] for label in makers}
        for _ in range(own["num_periods"]):
            for label, optimizer in optimizers.items():
                marks = [now()]
                for _ in range(period):
                    optimizer.step()
                    marks.append(now())
                times[label].append(np.diff(marks).tolist())
    return {**times, "num_parameters": sum(parameter.numel() for parameter in model.parameters())}


def _with_gradients(config: dict[str, Any], generator: torch.Generator, device: torch.device) -> nn.Module:
    model: nn.Module = instantiate(config).to(device)
    for parameter in model.parameters():
        parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=generator).to(device)
    return model


class _Products:
    """The products H = XWᵀ, X - HW and, in every update_period-th call, HᵀX for all axes longer than 16.

    With decompositions also, in those calls, the eigendecompositions of the (rank, rank) matrices of all axes,
    those of one rank at once, in double precision, as NGD takes them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rank: int | None,
        update_period: int,
        *,
        decompositions: bool = False,
    ) -> None:
        tensors = list(parameters)
        device = tensors[0].device
        ranks = Counter(fitting_rank(size, rank) for tensor in tensors for size in tensor.shape if size > 1)
        self._grams = [
            torch.randn(count, size, size, dtype=torch.float64, device=device)
            for size, count in (ranks.items() if decompositions else ())
        ]
        storage = torch.ones(max(tensor.numel() for tensor in tensors), device=device)
        self._axes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            for dim in (size for size in tensor.shape if size > 16):
                factor = torch.full((fitting_rank(dim, rank), dim), 1e-4, device=device)
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


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return means over repeats with 95 % t intervals."""
    rows = []
    for (model, optimizer), own in table.groupby(["model", "optimizer"], sort=False):
        row: dict[str, Any] = {"model": model, "parameters": own.parameters.iloc[0], "optimizer": optimizer}
        for column in ("milliseconds", "to_adam"):
            row |= stats.in_columns(column, own[column], unit="repeats")
        rows.append(row | own[["first_of_period", "others"]].mean().to_dict())
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("step-adam", "step-fused-adam")
ADAMS = dict(zip(CLAIMS, ("adam", "adam-fused"), strict=True))


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge NGD's step over Adam's, unfused and fused, on every model; intervals are over repeats."""
    results = []
    for model, own in computed["steps"].groupby("model", sort=False):
        taken = own.pivot_table("milliseconds", "repeat", "optimizer")
        why = f"Its matrix products alone take {taken['products'].mean():.3g} of {taken.ngd.mean():.3g} ms."
        for name, adam in ADAMS.items():
            claim = claims.claim(name, of=str(model))
            ratio = stats.geometric_mean(taken.ngd / taken[adam], unit="repeats")
            results.append(verdict(claim, *ratio, if_not_reproduced=why))
    return results


# ------------------------------------------------------------------------------------ what a step is made of
# A step is recorded as the sequence of its calls with their tensors, one with an update and one without. Sequences
# are then called again, call by call, in turn with whole steps of Adam and of NGD. A call on single numbers, whose
# arithmetic is nothing, tells what calling costs; what a call takes above that is arithmetic (with the memory it
# moves), which no other arrangement of the same calls spares. What a step takes above its calls is Python.
class Recorder(TorchDispatchMode):
    """Keep the calls made in this context, as the dispatcher sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "aten":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def part_of(call: Call) -> str:
    """Return which of `PARTS` a call belongs to."""
    func, args, _ = call
    name = func.overloadpacket.__name__.rstrip("_")  # type: ignore[attr-defined]  # of OpOverload
    if name == "_linalg_eigh":
        return "eigendecompositions"
    if name in _PRODUCTS:
        return "double products" if args[0].dtype == torch.float64 else "products"
    return "views" if name in _VIEWS else "element by element"


def _part_rows(run: Run, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each part of a step, and for NGD and Adam as they are.

    Means over a period of update_period steps, one of them with an update: calls of PyTorch in a step;
    milliseconds of one thread; of these calling, calls times the time of a call on single numbers, and
    arithmetic, the rest; both over Adam's step. The row "all calls" is the parts' sum; "least" that of the
    products and decompositions, and of the others what calling takes: the step if no small tensor took anything;
    "ngd" is the step as a user gets it. Each call's time is a median over `parts.num_repeats`. In double precision
    the parameters' own products count as double.
    """
    key = {"model": own["models"][name], "ngd": own["ngd"], "num_repeats": own["parts"]["num_repeats"]}
    found = _parts(run, name, **key)
    parts = found["parts"] | {whole: {"milliseconds": found[whole]} for whole in ("ngd", "adam")}
    least = sum(parts[part]["milliseconds"] for part in PARTS[:3]) + sum(parts[p]["calling"] for p in PARTS[3:])
    parts["least"] = {"milliseconds": least}
    columns = ("calls", "milliseconds", "calling", "arithmetic")
    rows = []
    for part in (*PARTS, "all calls", "least", "ngd", "adam"):
        row = {"model": name, "part": part} | {column: parts[part].get(column, np.nan) for column in columns}
        to_adam = {to: row[of] / found["adam"] for to, of in RATIOS.items()}
        rows.append(row | to_adam)
    return rows


@unit("benchmarks/ngd_step_parts", version=1, about="parts of a step of {model[_target_]}")
def _parts(
    run: Run, name: str, /, *, model: dict[str, Any], ngd: dict[str, Any], num_repeats: int
) -> dict[str, Any]:
    period = int(ngd["update_period"])
    with kernel_threads(1):
        network = _with_gradients(model, run.generator("gradients", name, "parts"), torch.device("cpu"))
        optimizers: dict[str, torch.optim.Optimizer] = {
            "ngd": NGD(network.parameters(), lr=1e-3, **ngd),
            "adam": torch.optim.Adam(network.parameters(), lr=1e-3),
        }
        for _ in range(-(-_WARM_UP // period) * period):  # the first ten calls all update
            for optimizer in optimizers.values():
                optimizer.step()
        sequences = [_recorded(optimizers["ngd"]) for _ in range(min(period, 2))]  # with an update, and without
        for _ in range(period - len(sequences)):
            optimizers["ngd"].step()
        steps: dict[str, list[float]] = {"ngd": [], "adam": []}
        alone: list[list[list[float]]] = [[] for _ in sequences]
        bare: list[float] = []
        numbers = torch.ones(1), torch.ones(1), torch.ones(1)
        for _ in range(num_repeats):
            for label, optimizer in optimizers.items():
                start = time.process_time()
                for _ in range(period):
                    optimizer.step()
                steps[label].append((time.process_time() - start) / period)
            for times, calls in zip(alone, sequences, strict=True):
                times.append(_replayed(calls))
            bare += _replayed([(torch.ops.aten.mul.out, numbers[:2], {"out": numbers[2]})] * 20)
    call = float(np.median(bare))
    rows = []
    for weight, times, calls in zip((1 / period, (period - 1) / period), alone, sequences, strict=False):
        for seconds, made in zip(1e3 * weight * np.median(times, axis=0), calls, strict=True):
            calling = min(1e3 * weight * call, seconds)
            row = {"part": part_of(made), "calls": weight, "milliseconds": seconds, "calling": calling}
            rows.append(row | {"arithmetic": seconds - calling})
    summed = pd.DataFrame(rows).groupby("part").sum().reindex(PARTS, fill_value=0.0)
    summed.loc["all calls"] = summed.sum()
    wholes = {label: 1e3 * float(np.median(taken)) for label, taken in steps.items()}
    return {"parts": summed.to_dict("index"), **wholes}


def _recorded(optimizer: torch.optim.Optimizer) -> list[Call]:
    with Recorder() as recorder:
        optimizer.step()
    return recorder.calls


@torch.no_grad()
def _replayed(calls: list[Call]) -> list[float]:
    """Return seconds of each call, of this thread, made in turn on the tensors of its first time."""
    seconds = []
    for func, args, kwargs in calls:
        start = time.thread_time()
        func(*args, **kwargs)
        end = time.thread_time()
        # Reading the clock takes as long as a small call does: it is read once more, for nothing.
        seconds.append(max(2 * end - start - time.thread_time(), 0.0))
    return seconds
