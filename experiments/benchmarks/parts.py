"""A benchmark of several parts, of which `parts` of its config names those that are run.

A part is one module or more: `compute` gives its tables, `judge` the verdicts of its `CLAIMS`, `draw` its figures.
A task says of which parts it is in `used_in`; what stands in the section of a part holds for that part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import cast

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, task_settings
from experiments.shared.task import Task

Parts = Mapping[str, Sequence[ModuleType]]


def tasks_of(run: Run, cfg: DictConfig, part: str) -> Iterator[Task]:
    """Yield the tasks of a part with its settings."""
    for name, settings in task_settings(cfg).items():
        if part in settings.used_in:
            yield Task.load(run, name, cast(DictConfig, OmegaConf.merge(settings, settings.get(part, {}))))


def compute_parts(parts: Parts, run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables of the parts that the config names."""
    tables: dict[str, pd.DataFrame] = {}
    for name in cfg.parts:
        for module in parts[name]:
            tables |= module.compute(run, cfg) if hasattr(module, "compute") else {}
    return tables


def judge_parts(parts: Parts, computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the parts that ran; the claims of the others are out of reach."""
    results: list[ClaimResult] = []
    for name, modules in parts.items():
        for module in modules:
            if name not in computed.config["parts"]:
                reason = f"parts does not name {name}."
                results += [claims.unjudged(own, reason) for own in getattr(module, "CLAIMS", ())]
            elif hasattr(module, "judge"):
                results += module.judge(computed, claims)
    return results


def draw_parts(parts: Parts, computed: Computed) -> dict[str, Figure]:
    """Return the figures of the parts that ran."""
    figures: dict[str, Figure] = {}
    for name in computed.config["parts"]:
        for module in parts[name]:
            figures |= module.draw(computed) if hasattr(module, "draw") else {}
    return figures
