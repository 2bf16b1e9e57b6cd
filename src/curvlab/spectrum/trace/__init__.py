"""Trace, method by method."""

from curvlab.spectrum.trace.hutchinson import hutchinson_trace

__all__ = ["hutchinson_trace"]
