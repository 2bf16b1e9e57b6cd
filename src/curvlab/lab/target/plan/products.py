"""How many products a target takes: declared where its config tells, else as its published run counted them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from curvlab.lab.target.declaration import Target
from curvlab.lab.target.discovery import ROOT
from curvlab.lab.target.plan.sizes import Sizes

# Products of Lanczos for λmax to 1 %, an assumption: their number follows from the spectrum, 300 at most.
LANCZOS = 20


@dataclass(frozen=True)
class Products:
    """What a task takes.

    Attributes:
        full: products with all of its examples.
        examples: further ones, each with one example.
    """

    full: float
    examples: float


def hyperparameters(task: Mapping[str, Any], sizes: Sizes) -> Products:
    """Return those of lissa-tab1: trace, Lanczos, sketch; quadratic forms (3F of 5F) and C on batches."""
    forms, constant = task["forms"], task["constant"]
    directions = constant["num_leading"] + constant["num_random"] + 1
    full = task["spectrum"]["trace_probes"] + LANCZOS * (1 + constant["num_leading"]) + task["sketch"]["size"]
    batches = directions * constant["num_batches"] * constant["batch_size"]
    return Products(full, 0.6 * forms["num_probes"] * forms["batch_size"] + batches + constant["num_examples"])


def norms(task: Mapping[str, Any], sizes: Sizes) -> Products:
    """Return those of lissa-tab3: trace, Lanczos, both sketches and their repetitions, ‖G‖_F twice, gradients."""
    norm, repeated = task["frobenius"], task["repeated"]
    full = task["spectrum"]["trace_probes"] + LANCZOS + norm["num_probes"]
    full += _both_sketches(task["sketch"]["size"], sizes.num_tensors)
    if repeated["num_products"] is not None:
        full += repeated["num_repetitions"] * _both_sketches(repeated["num_products"], sizes.num_tensors)
    examples = 2 * norm["num_pairs"] * norm["batch_size"] + 0.6 * 2 * task["gradients"]["num_pairs"]
    return Products(full, examples)


def _both_sketches(size: int, num_tensors: int) -> int:
    return size + math.ceil(size / num_tensors) * num_tensors


# By target. Every other one says that its number of products follows from what it finds: steps to a residual, say.
DECLARED: dict[str, Callable[[Mapping[str, Any], Sizes], Products]] = {
    "lissa/tab1": hyperparameters,
    "lissa/tab3": norms,
}


@dataclass(frozen=True)
class Published:
    """The last published run of a preset.

    Attributes:
        seconds: CPU seconds of its units of work, those that it shares with others included.
        num_matvecs: products that it counted, each with some or all examples of some task.
        units: lines about kinds of units: how often, and how long.
        device: that it ran on.
    """

    seconds: float
    num_matvecs: int
    units: tuple[str, ...]
    device: str


def published_run(target: Target, preset: str) -> Published | None:
    """Return it, or None where nothing is published."""
    try:
        text = (ROOT / "results" / target.key / preset / "run.json").read_text(encoding="utf-8")
        record = json.loads(text)
        units = record["units"] if isinstance(record["units"], list) else []
        lines = tuple(f"{unit['count']} x {unit['name']}, {float(unit['seconds']):.0f} s" for unit in units)
        return Published(float(record["unit_seconds"]), int(record["num_matvecs"]), lines, str(record["device"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
