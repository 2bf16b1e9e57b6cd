"""Runs of targets: configuration, resumable store, provenance, tracking."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlab.lab.runs.run import Run, start
    from curvlab.lab.runs.store import Store

_HOMES = {"Run": "run", "Store": "store", "start": "run"}  # loaded when used: torch comes with them

__all__ = ["Run", "Store", "start"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
