"""What can be known about a spectrum from products: trace, norm, largest eigenvalues, density."""

from curvlab.spectrum.density import SpectralDensity, spectral_density
from curvlab.spectrum.eigenvalues import Eigenvalues, SketchedEigenvalues, sketch_eigenvalues, top_eigenvalues
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.frobenius_norm import frobenius_norm
from curvlab.spectrum.orthonormal import orthonormalise
from curvlab.spectrum.trace import hutchinson_trace, hutchpp_trace, mean_eigenvalue, xtrace

__all__ = [
    "Eigenvalues",
    "Estimate",
    "SketchedEigenvalues",
    "SpectralDensity",
    "frobenius_norm",
    "hutchinson_trace",
    "hutchpp_trace",
    "mean_eigenvalue",
    "orthonormalise",
    "sketch_eigenvalues",
    "spectral_density",
    "top_eigenvalues",
    "xtrace",
]
