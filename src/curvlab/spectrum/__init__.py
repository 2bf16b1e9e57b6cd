"""What can be known about a spectrum from products: trace, largest eigenvalues."""

from curvlab.spectrum.eigenvalues import Eigenvalues, top_eigenvalues
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.trace import hutchinson_trace

__all__ = ["Eigenvalues", "Estimate", "hutchinson_trace", "top_eigenvalues"]
