"""Configuration, resumable store, provenance, tracking."""

from curvlab.runs.configuration import load_config, main
from curvlab.runs.overrides import ConfigurationError
from curvlab.runs.store import Store

__all__ = ["ConfigurationError", "Store", "load_config", "main"]
