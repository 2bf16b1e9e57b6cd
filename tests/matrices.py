"""Matrices of known eigenvalues, and operators that count what they are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.linalg import DenseOperator


def with_spectrum(eigenvalues: Tensor, generator: torch.Generator | int = 0) -> Tensor:
    """Return a dense symmetric matrix with these eigenvalues and random eigenvectors, (n, n), fp64."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    size = len(eigenvalues)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = basis * eigenvalues.double() @ basis.T
    return (matrix + matrix.T) / 2


class CountingOperator(DenseOperator):
    """Counts the columns of its full products."""

    columns = 0

    def matmat(self, vectors: Tensor) -> Tensor:
        self.columns += vectors.shape[1]
        return super().matmat(vectors)
