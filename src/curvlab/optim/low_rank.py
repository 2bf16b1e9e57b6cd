"""Matrices of low rank in an orthonormal basis, and shifted solves in O(n)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRankMatrix:
    """Q C Qᵀ, (n, n), not symmetric in general, never formed.

    Attributes:
        basis: Q, (n, r), orthonormal columns.
        core: C, (r, r).
    """

    basis: Tensor
    core: Tensor

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, span: Tensor) -> LowRankMatrix:
        """Return A Bᵀ for A and B of shape (n, k), whose columns lie in the span of `span`, (n, r).

        Cost: a QR factorisation, O(n r²).
        """
        basis = torch.linalg.qr(span).Q
        return cls(basis, (basis.T @ left) @ (basis.T @ right).T)

    def solve_shifted(self, b: Tensor, *, shift: float) -> Tensor:
        """Return (Q C Qᵀ + shift I)⁻¹ b, (n,) -> (n,). Cost: O(n r) and one r x r solve.

        Woodbury's identity in an orthonormal basis: C + shift I inside the span, shift outside. The usual form,
        1/shift [I - A (shift I + BᵀA)⁻¹ Bᵀ], cancels where the shift is small.
        """
        inside = self.basis.T @ b
        identity = torch.eye(len(self.core), dtype=self.core.dtype, device=self.core.device)
        solution = self.basis @ torch.linalg.solve(self.core + shift * identity, inside)
        if self._spans_everything:
            return solution
        return solution + (b - self.basis @ inside) / shift

    def smallest_eigenvalue(self) -> float:
        """Return the smallest eigenvalue of the symmetric part, (M + Mᵀ)/2. Cost: O(r³)."""
        smallest = float(torch.linalg.eigvalsh((self.core + self.core.T) / 2)[0])
        return smallest if self._spans_everything else min(smallest, 0.0)

    def to_dense(self) -> Tensor:
        """Return the (n, n) matrix."""
        return self.basis @ self.core @ self.basis.T

    @property
    def _spans_everything(self) -> bool:
        return self.basis.shape[1] == self.basis.shape[0]
