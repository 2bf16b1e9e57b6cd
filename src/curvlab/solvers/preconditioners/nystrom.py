"""Randomised Nyström preconditioner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.linalg import DerivedOperator, LinearOperator, checked_product, generator_for, orthonormalise
from curvlab.seeding import Seed
from curvlab.solvers.solver import IndefiniteOperatorError


class NystromInverse(DerivedOperator):
    """M = U (Λ + damping)⁻¹ Uᵀ + τ (I - UUᵀ), approximating (G + damping I)⁻¹, with τ = (λ_min + damping)⁻¹.

    Where M would be worse conditioned than its dtype can tell, τ is capped.

    Args:
        vectors: U, (P, r), orthonormal.
        eigenvalues: Λ, (r,), descending; λ_min is the last.
        shift: the damping.
        like: operator whose dtype, device and inner products to use.
    """

    def __init__(self, vectors: Tensor, eigenvalues: Tensor, shift: float, *, like: LinearOperator) -> None:
        super().__init__(like)
        self.vectors, self.eigenvalues, self.shift = vectors, eigenvalues, shift
        # No better conditioned than the dtype can tell: else rounding in the tail makes M indefinite.
        precision = 30 * torch.finfo(like.dtype).eps
        tail = 1 / max(float(eigenvalues[-1]) + shift, precision * (float(eigenvalues[0]) + shift))
        self._tail = tail
        self._excess = (1 / (eigenvalues + shift) - tail).to(vectors)

    def __str__(self) -> str:
        """Return the rank."""
        return f"a Nyström approximation of rank {len(self.eigenvalues):,}"

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return M V. Cost: 4PrK operations, no product with G."""
        return self._tail * vectors + self.vectors @ (self._excess[:, None] * self.gram(self.vectors, vectors))

    @property
    def is_psd(self) -> bool:
        """True: both parts are positive."""
        return True


@dataclass(frozen=True)
class Nystrom:
    """Recipe for a `NystromInverse` (Frangella, Tropp & Udell 2023, Algorithms 2.1 and 5.1).

    Conjugate gradients then see a condition number of about (λ_rank + damping) / damping: worth the rank
    products wherever fewer than rank eigenvalues are much larger than the damping.

    Args:
        rank: r, at most P; products of the set-up, memory of 2 r vectors while it is built, r afterwards.
    """

    rank: int

    def __post_init__(self) -> None:
        whole("rank", self.rank)

    def build(self, operator: LinearOperator, *, generator: Seed = None) -> tuple[NystromInverse, int]:
        """Return M for `operator` = G + damping I, whose own `damping` is used, and the products it took."""
        generator = generator_for(operator, generator)
        damping = operator.damping
        rank = min(self.rank, operator.shape[0])
        tests, _ = orthonormalise(operator, operator.randn(rank, generator))
        images = checked_product(operator, tests) - damping * tests  # G Ω
        core = operator.gram(tests, images).double().cpu()
        values, rotation = torch.linalg.eigh((core + core.T) / 2)
        # Products are off by rounding of the largest, so eigenvalues of the core matrix are too.
        rounding = 10 * torch.finfo(operator.dtype).eps * float(operator.norm(images).norm())
        if float(values.min()) < -100 * rounding:
            raise IndefiniteOperatorError(
                operator, "minus its damping is not positive semi-definite, as the Nyström approximation needs"
            )
        kept = values > rounding
        if damping <= 0 and not bool(kept.all()):
            raise ValueError(
                "the operator has rank below the preconditioner's and no damping: add damping, or lower the rank "
                f"of {rank} to {int(kept.sum())} or less"
            )
        if not bool(kept.any()):  # G is zero
            nothing = torch.zeros(1, dtype=torch.float64, device=images.device)
            return NystromInverse(tests[:, :1], nothing, damping, like=operator), rank
        # G ≈ (G Ω) core⁻¹ (G Ω)ᵀ = B Bᵀ with B = (G Ω) Q |Λ|^-1/2, where the core matrix Q Λ Qᵀ is not rounding.
        factor = rotation[:, kept] / values[kept].sqrt()
        basis, triangular = orthonormalise(operator, images @ factor.to(images))
        left, singular_values, _ = torch.linalg.svd(triangular, full_matrices=False)
        eigenvalues = singular_values**2
        vectors = basis @ left.to(basis)
        return NystromInverse(vectors, eigenvalues, damping, like=operator), rank
