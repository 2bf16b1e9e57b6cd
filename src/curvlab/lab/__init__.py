"""The lab: what reproduces papers on top of the library. Nothing of the library imports it.

    from curvlab.lab import Computed, Run, Target, t_interval, unit

Data sets are in `curvlab.lab.data`, networks in `curvlab.lab.models`.
"""

# ruff: noqa: F401  (imports for type checkers; `__getattr__` loads what is used)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab.lab.targets.target import Target

if TYPE_CHECKING:
    from curvlab.lab import panels, tables
    from curvlab.lab.claims.claim_sheet import ClaimSheet, load_claims
    from curvlab.lab.claims.claims import Claim, ClaimResult, Criterion, judge, out_of_reach
    from curvlab.lab.claims.intervals import Interval, bootstrap_interval, exact, t_interval
    from curvlab.lab.reporting import plots
    from curvlab.lab.reporting.paper_numbers import PaperNumber, PaperNumbers, load_paper_numbers
    from curvlab.lab.runs.overrides import ConfigurationError
    from curvlab.lab.runs.run import Run, start, unit
    from curvlab.lab.targets.command import load_config
    from curvlab.lab.targets.execution import Computed, draw_target, run_target
    from curvlab.lab.targets.settings import task_label, task_settings
    from curvlab.lab.targets.target import all_targets

# Loaded when used: `make help` needs no package at all, and `--help` of a target no torch.
_HOMES = {
    "claims": "Claim ClaimResult ClaimSheet Criterion Interval bootstrap_interval exact judge load_claims "
    "out_of_reach t_interval",
    "reporting.paper_numbers": "PaperNumber PaperNumbers load_paper_numbers",
    "runs.overrides": "ConfigurationError",
    "runs.run": "Run start unit",
    "targets.command": "load_config",
    "targets.execution": "Computed draw_target run_target",
    "targets.settings": "task_label task_settings",
    "targets.target": "all_targets",
}
_MODULES = {"panels": "panels", "plots": "reporting.plots", "tables": "tables"}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{_MODULES[name]}")
