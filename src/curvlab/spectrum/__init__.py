"""What can be known about a spectrum from products: trace, diagonal, norm, largest eigenvalues, density."""

from curvlab.spectrum.deflated_trace import hutchpp_trace, xtrace
from curvlab.spectrum.density import SpectralDensity, spectral_density
from curvlab.spectrum.diagonal import Diagonal, hutchinson_diagonal
from curvlab.spectrum.eigenvalues import Eigenvalues, top_eigenvalues
from curvlab.spectrum.norm import frobenius_norm
from curvlab.spectrum.sketch import SketchedEigenvalues, sketch_eigenvalues
from curvlab.spectrum.trace import Estimate, hutchinson_trace, mean_eigenvalue

__all__ = [
    "Diagonal",
    "Eigenvalues",
    "Estimate",
    "SketchedEigenvalues",
    "SpectralDensity",
    "frobenius_norm",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hutchpp_trace",
    "mean_eigenvalue",
    "sketch_eigenvalues",
    "spectral_density",
    "top_eigenvalues",
    "xtrace",
]
