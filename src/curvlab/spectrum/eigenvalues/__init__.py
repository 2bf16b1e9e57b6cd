"""Eigenvalues, method by method."""

from curvlab.spectrum.eigenvalues.lanczos import BlockLanczos, Eigenvalues, top_eigenvalues
from curvlab.spectrum.eigenvalues.sketch import SketchedEigenvalues, sketch_eigenvalues

__all__ = ["BlockLanczos", "Eigenvalues", "SketchedEigenvalues", "sketch_eigenvalues", "top_eigenvalues"]
