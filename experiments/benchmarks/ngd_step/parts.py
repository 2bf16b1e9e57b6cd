"""What NGD's step is made of: the calls of PyTorch it makes, each timed alone, and what is arithmetic in them.

A step is recorded as the sequence of its calls with their tensors, one with an update and one without. Sequences
are then called again, call by call, in turn with whole steps of Adam and of NGD. A call on single numbers, whose
arithmetic is nothing, tells what calling costs; what a call takes above that is arithmetic (with the memory it
moves), which no other arrangement of the same calls spares. What a step takes above its calls is Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.lab import runs
from curvlab.optim import NGD
from experiments.benchmarks.timing import kernel_threads

PARTS = ("products", "double products", "eigendecompositions", "element by element", "views")
COLUMNS = ("model", "part", "calls", "milliseconds", "calling", "arithmetic", "to_adam", "arithmetic_to_adam")
_PRODUCTS = ("bmm", "baddbmm", "mm", "addmm")
_VIEWS = (
    "view",
    "transpose",
    "slice",
    "unsqueeze",
    "expand",
    "select",
    "split",
    "unbind",
    "as_strided",
    "permute",
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


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


def parts_table(run: runs.Run, cfg: DictConfig) -> pd.DataFrame:
    """Return, for each of `parts.models`, a row for each part of a step, and for NGD and Adam as they are.

    Columns `COLUMNS`, means over a period of update_period steps, one of them with an update: calls of PyTorch in
    a step; milliseconds of one thread; of these calling, calls times the time of a call on single numbers, and
    arithmetic, the rest; both over Adam's step. The row "all calls" is the parts' sum; "least" that of the
    products and decompositions, and of the others what calling takes: the step if no small tensor took anything;
    "ngd" is the step as a user gets it. Each call's time is a median over `parts.num_repeats`. In double precision
    the parameters' own products count as double.
    """
    rows = []
    for name in cfg.parts.models:
        key = {
            "model": OmegaConf.to_container(cfg.models[name], resolve=True),
            "ngd": OmegaConf.to_container(cfg.ngd, resolve=True),
            "num_repeats": cfg.parts.num_repeats,
        }
        compute = partial(_timed, run, cfg, str(name))
        found = run.unit("benchmarks/ngd_step_parts", key, compute, version=1, about=f"parts of a step of {name}")
        adam, parts = found["adam"], found["parts"]
        whole = [parts[part]["milliseconds"] for part in PARTS[:3]]
        least = {"milliseconds": sum(whole) + sum(parts[part]["calling"] for part in PARTS[3:])}
        for part in (*PARTS, "all calls", "least", "ngd", "adam"):
            own = least if part == "least" else parts.get(part, {"milliseconds": found.get(part)})
            row = {"model": name, "part": part, **own, "to_adam": own["milliseconds"] / adam}
            if "arithmetic" in own:
                row["arithmetic_to_adam"] = own["arithmetic"] / adam
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _timed(run: runs.Run, cfg: DictConfig, name: str) -> dict[str, Any]:
    period = int(cfg.ngd.update_period)
    with kernel_threads(1):
        model: nn.Module = instantiate(cfg.models[name])
        generator = run.generator("gradients", name, "parts")
        for parameter in model.parameters():
            parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=generator)
        ngd, adam = (
            NGD(model.parameters(), lr=1e-3, **dict(cfg.ngd)),
            torch.optim.Adam(model.parameters(), lr=1e-3),
        )
        for _ in range(-(-12 // period) * period):  # the first ten calls all update
            ngd.step()
            adam.step()
        sequences = [_recorded(ngd) for _ in range(min(period, 2))]  # with an update, and without
        for _ in range(period - len(sequences)):
            ngd.step()
        steps: dict[str, list[float]] = {"ngd": [], "adam": []}
        alone: list[list[list[float]]] = [[] for _ in sequences]
        bare: list[float] = []
        numbers = torch.ones(1), torch.ones(1), torch.ones(1)
        for _ in range(cfg.parts.num_repeats):
            for label, optimizer in (("ngd", ngd), ("adam", adam)):
                start = time.process_time()
                for _ in range(period):
                    optimizer.step()
                steps[label].append((time.process_time() - start) / period)
            for times, calls in zip(alone, sequences, strict=True):
                times.append(_replayed(calls))
            bare += _replayed([(torch.ops.aten.mul.out, numbers[:2], {"out": numbers[2]})] * 20)
    call = float(np.median(bare))
    weights = [1 / period, (period - 1) / period][: len(sequences)]
    parts = {part: {"calls": 0.0, "milliseconds": 0.0, "calling": 0.0, "arithmetic": 0.0} for part in PARTS}
    for weight, times, calls in zip(weights, alone, sequences, strict=True):
        for seconds, own in zip(np.median(times, axis=0), calls, strict=True):
            part = parts[part_of(own)]
            part["calls"] += weight
            part["milliseconds"] += weight * 1e3 * seconds
            part["calling"] += weight * 1e3 * min(call, seconds)
            part["arithmetic"] += weight * 1e3 * max(seconds - call, 0.0)
    parts["all calls"] = {key: sum(part[key] for part in parts.values()) for key in parts[PARTS[0]]}
    return {"parts": parts, **{label: 1e3 * float(np.median(own)) for label, own in steps.items()}}


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
