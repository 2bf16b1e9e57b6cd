"""Trace, method by method."""

from curvlab.spectrum.trace.hutchinson import hutchinson_trace
from curvlab.spectrum.trace.hutchpp import hutchpp_trace
from curvlab.spectrum.trace.mean_eigenvalue import mean_eigenvalue
from curvlab.spectrum.trace.xtrace import xtrace

__all__ = ["hutchinson_trace", "hutchpp_trace", "mean_eigenvalue", "xtrace"]
