"""What all targets share: their declaration, their command line, and computing, judging and drawing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab.lab.target.declaration import Target

if TYPE_CHECKING:
    from curvlab.lab.target.entry import load_config, main
    from curvlab.lab.target.execution import Computed, run_target
    from curvlab.lab.target.tasks import task_label, task_settings

# Loaded when used: `make help` needs no package at all, and `--help` of a target no torch.
_HOMES = {
    "Computed": "execution",
    "load_config": "entry",
    "main": "entry",
    "run_target": "execution",
    "task_label": "tasks",
    "task_settings": "tasks",
}

__all__ = ["Computed", "Target", "load_config", "main", "run_target", "task_label", "task_settings"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
