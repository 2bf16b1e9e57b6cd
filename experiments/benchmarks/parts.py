"""A benchmark of several parts, of which `parts` of its config names those that are run.

A part is one module or more: `compute` gives its tables, `judge` the verdicts of its `CLAIMS`, `draw` its figures.
A task says of which parts it is in `used_in`; what stands in the section of a part holds for that part.

    compute, judge, draw = of_parts({"products": [products], "steps": [steps, claims_of_steps]})
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, task_settings
from experiments.shared.gauges import load_average
from experiments.shared.task import Task


def tasks_of(run: Run, cfg: DictConfig, part: str) -> Iterator[Task]:
    """Yield the tasks of a part with its settings."""
    for name, settings in task_settings(cfg).items():
        if part in settings.used_in:
            yield Task.load(run, name, cast(DictConfig, OmegaConf.merge(settings, settings.get(part, {}))))


def of_parts(parts: Mapping[str, Sequence[ModuleType]]) -> tuple[Callable[..., Any], ...]:
    """Return the `compute`, `judge` and `draw` of a target, of those of its parts that the config names."""

    def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
        tables: dict[str, pd.DataFrame] = {}
        for module in (module for name in cfg.parts for module in parts[name]):
            tables |= module.compute(run, cfg) if hasattr(module, "compute") else {}
        run.note(load_average=load_average(), threads=torch.get_num_threads())
        return tables

    def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
        results: list[ClaimResult] = []
        for name, module in ((name, module) for name, own in parts.items() for module in own):
            if name not in computed.config["parts"]:
                reason = f"parts does not name {name}."
                results += [claims.unjudged(own, reason) for own in getattr(module, "CLAIMS", ())]
            elif hasattr(module, "judge"):
                results += module.judge(computed, claims)
        return results

    def draw(computed: Computed) -> dict[str, Figure]:
        figures: dict[str, Figure] = {}
        for module in (module for name in computed.config["parts"] for module in parts[name]):
            figures |= module.draw(computed) if hasattr(module, "draw") else {}
        return figures

    return compute, judge, draw
