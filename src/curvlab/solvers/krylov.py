"""An orthonormal basis of the Krylov space of given vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.spectrum import orthonormalise
from curvlab.spectrum.probes import checked_product


class KrylovSpace:
    """Q = [Q_1, ..., Q_s] spanning (B, AB, ..., A^{s-1}B), with A Q = Q T + Q_next C E_sᵀ and B = Q_1 F.

    Block Lanczos with full reorthogonalisation, grown one block a `step`. `spectrum.BlockLanczos` looks for
    eigenvalues from random vectors and puts new random ones where a direction vanishes; here such a direction
    leaves the block, because functions of A times B lie in the space of B alone.

    Attributes:
        basis: Q, (P, m).
        projected: T = QᵀAQ, (m, m), fp64 on the CPU.
        factor: F, (r, K), fp64 on the CPU.
        num_matvecs: products so far.

    Args:
        operator: A, symmetric.
        vectors: B, (P, K), not all zero.
    """

    def __init__(self, operator: LinearOperator, vectors: Tensor) -> None:
        self.operator = operator
        self.num_matvecs = 0
        self._pending, self.factor = orthonormalise(operator, vectors)
        self.basis = self._pending[:, :0]
        self.projected = torch.zeros(0, 0, dtype=torch.float64)
        self._coupling = torch.zeros(self._pending.shape[1], 0, dtype=torch.float64)
        self._scale = 0.0  # a lower bound of ‖A‖: what rounding is measured against

    @property
    def complete(self) -> bool:
        """Whether the space holds A times all of itself: then functions of T give functions of A exactly."""
        return self._pending.shape[1] == 0

    def step(self) -> None:
        """Add the pending block to the basis, multiply by it, and find the next block."""
        old, block = self.basis.shape[1], self._pending
        products = checked_product(self.operator, block)
        self.num_matvecs += block.shape[1]
        self.basis = torch.cat([self.basis, block], dim=1)
        corner = self.operator.gram(block, products).double().cpu()
        size, before = self.basis.shape[1], self._coupling.shape[1]
        projected = torch.zeros(size, size, dtype=torch.float64)
        projected[:old, :old] = self.projected
        projected[old:, old:] = (corner + corner.T) / 2
        projected[old:, old - before : old] = self._coupling
        projected[old - before : old, old:] = self._coupling.T
        self.projected = projected
        self._scale = max(self._scale, float(torch.linalg.matrix_norm(projected[old - before :, old:], ord=2)))
        self._pending, self._coupling = orthonormalise(
            self.operator, products, against=self.basis, scale=self._scale
        )

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on here."""
        own = {name: value for name, value in vars(self).items() if name != "operator"}
        return own | {"_pending": self._pending.clone()}  # a view of all that it was orthogonalised against

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state` of the same operator and vectors."""
        vars(self).update(state)
        self.basis, self._pending = (part.to(self.operator.device) for part in (self.basis, self._pending))

    def leak(self, coefficients: Tensor) -> Tensor:
        """Return ‖A Q c - Q T c‖ of each column of c, (m, K) -> (K,): what leaves the space."""
        return torch.linalg.vector_norm(self._coupling @ coefficients[-self._coupling.shape[1] :], dim=0)
