"""The lab: what reproduces papers on top of the library. Nothing of the library imports it.

    from curvlab.lab import Computed, Run, Target, t_interval, unit

Data sets are in `curvlab.lab.data`, networks in `curvlab.lab.models`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab.lab.targets.target import Target

if TYPE_CHECKING:
    from curvlab.lab import panels, tables
    from curvlab.lab.reporting import plots
    from curvlab.lab.reporting.claim_sheet import ClaimSheet
    from curvlab.lab.reporting.claims import Claim, ClaimResult, Criterion, judge, load_claims, out_of_reach
    from curvlab.lab.reporting.intervals import Interval, bootstrap_interval, exact, t_interval
    from curvlab.lab.reporting.paper_numbers import PaperNumber, PaperNumbers, load_paper_numbers
    from curvlab.lab.runs.overrides import ConfigurationError
    from curvlab.lab.runs.run import Run, start, unit
    from curvlab.lab.targets.command import load_config
    from curvlab.lab.targets.execution import Computed, draw_target, run_target
    from curvlab.lab.targets.settings import task_label, task_settings
    from curvlab.lab.targets.target import all_targets

# Loaded when used: `make help` needs no package at all, and `--help` of a target no torch.
_HOMES = {
    "Claim": "reporting.claims",
    "ClaimResult": "reporting.claims",
    "ClaimSheet": "reporting.claim_sheet",
    "Computed": "targets.execution",
    "ConfigurationError": "runs.overrides",
    "Criterion": "reporting.claims",
    "Interval": "reporting.intervals",
    "PaperNumber": "reporting.paper_numbers",
    "PaperNumbers": "reporting.paper_numbers",
    "Run": "runs.run",
    "all_targets": "targets.target",
    "bootstrap_interval": "reporting.intervals",
    "draw_target": "targets.execution",
    "exact": "reporting.intervals",
    "judge": "reporting.claims",
    "load_claims": "reporting.claims",
    "load_config": "targets.command",
    "load_paper_numbers": "reporting.paper_numbers",
    "out_of_reach": "reporting.claims",
    "run_target": "targets.execution",
    "start": "runs.run",
    "t_interval": "reporting.intervals",
    "task_label": "targets.settings",
    "task_settings": "targets.settings",
    "unit": "runs.run",
}
_MODULES = {"panels": "panels", "plots": "reporting.plots", "tables": "tables"}

__all__ = [
    "Claim",
    "ClaimResult",
    "ClaimSheet",
    "Computed",
    "ConfigurationError",
    "Criterion",
    "Interval",
    "PaperNumber",
    "PaperNumbers",
    "Run",
    "Target",
    "all_targets",
    "bootstrap_interval",
    "draw_target",
    "exact",
    "judge",
    "load_claims",
    "load_config",
    "load_paper_numbers",
    "out_of_reach",
    "panels",
    "plots",
    "run_target",
    "start",
    "t_interval",
    "tables",
    "task_label",
    "task_settings",
    "unit",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
