"""The lab: what reproduces papers on top of the library. Nothing of the library imports it.

    from curvlab.lab import Computed, Run, Target, t_interval, unit

Data sets are in `curvlab.lab.data`, networks in `curvlab.lab.models`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab.lab.target.declaration import Target

if TYPE_CHECKING:
    from curvlab.lab.reporting import plots
    from curvlab.lab.reporting.claim_sheet import ClaimSheet
    from curvlab.lab.reporting.claims import Claim, ClaimResult, Criterion, judge, out_of_reach
    from curvlab.lab.reporting.intervals import Interval, bootstrap_interval, exact, t_interval
    from curvlab.lab.reporting.paper_numbers import PaperNumber, PaperNumbers, load_paper_numbers
    from curvlab.lab.runs.overrides import ConfigurationError
    from curvlab.lab.runs.run import Run
    from curvlab.lab.runs.unit import unit
    from curvlab.lab.target.entry import load_config
    from curvlab.lab.target.execution import Computed
    from curvlab.lab.target.tasks import task_label, task_settings

# Loaded when used: `make help` needs no package at all, and `--help` of a target no torch.
_HOMES = {
    "Claim": "reporting.claims",
    "ClaimResult": "reporting.claims",
    "ClaimSheet": "reporting.claim_sheet",
    "Computed": "target.execution",
    "ConfigurationError": "runs.overrides",
    "Criterion": "reporting.claims",
    "Interval": "reporting.intervals",
    "PaperNumber": "reporting.paper_numbers",
    "PaperNumbers": "reporting.paper_numbers",
    "Run": "runs.run",
    "bootstrap_interval": "reporting.intervals",
    "exact": "reporting.intervals",
    "judge": "reporting.claims",
    "load_config": "target.entry",
    "load_paper_numbers": "reporting.paper_numbers",
    "out_of_reach": "reporting.claims",
    "t_interval": "reporting.intervals",
    "task_label": "target.tasks",
    "task_settings": "target.tasks",
    "unit": "runs.unit",
}

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
    "bootstrap_interval",
    "exact",
    "judge",
    "load_config",
    "load_paper_numbers",
    "out_of_reach",
    "plots",
    "t_interval",
    "task_label",
    "task_settings",
    "unit",
]


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module(f"{__name__}.reporting.plots")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
