"""Configuration, resumable store, provenance, tracking."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlab.lab.runs.configuration import Entry, load_config, main
    from curvlab.lab.runs.overrides import ConfigurationError
    from curvlab.lab.runs.run import Run, start
    from curvlab.lab.runs.store import Store

# Loaded when used: what only reads a command line or prints help need not wait for torch.
_HOMES = {
    "ConfigurationError": "overrides",
    "Entry": "configuration",
    "Run": "run",
    "Store": "store",
    "load_config": "configuration",
    "main": "configuration",
    "start": "run",
}

__all__ = ["ConfigurationError", "Entry", "Run", "Store", "load_config", "main", "start"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
