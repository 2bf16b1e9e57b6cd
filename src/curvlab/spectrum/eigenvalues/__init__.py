"""Eigenvalues, method by method."""

from curvlab.spectrum.eigenvalues.lanczos import BlockLanczos, Eigenvalues, top_eigenvalues

__all__ = ["BlockLanczos", "Eigenvalues", "top_eigenvalues"]
