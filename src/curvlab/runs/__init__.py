"""Configuration, resumable store, provenance, tracking."""

from curvlab.runs.configuration import load_config, main
from curvlab.runs.overrides import ConfigurationError
from curvlab.runs.run import Run, start
from curvlab.runs.store import Store

__all__ = ["ConfigurationError", "Run", "Store", "load_config", "main", "start"]
