"""The identity, which damping is written with."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.linalg.operator import LinearOperator, SumOperator, refuse_to_add


class Identity:
    """A multiple of the identity that takes its size from the operator it is added to.

    `op + damping * identity` is the only way damping enters: a solver receives the matrix it inverts.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __mul__(self, factor: float) -> Identity:
        return Identity(self.scale * float(factor))

    __rmul__ = __mul__

    def __add__(self, other: LinearOperator) -> SumOperator:
        if not isinstance(other, LinearOperator):
            refuse_to_add(self, other)
        return other + self

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"{self.scale:g} * identity"

    def like(self, operator: LinearOperator) -> IdentityOperator:
        """Return this multiple of the identity with the size, dtype and device of `operator`."""
        return IdentityOperator(operator.shape[0], scale=self.scale, dtype=operator.dtype, device=operator.device)


identity = Identity()


class IdentityOperator(LinearOperator):
    """c·I of a definite size."""

    def __init__(self, size: int, *, scale: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(size, dtype=dtype, device=device)
        self.scale = scale

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return c V. Cost: one multiplication."""
        return self.scale * vectors

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> IdentityOperator:
        """Return itself: the identity is the same on every batch."""
        return self

    @property
    def is_psd(self) -> bool:
        """Whether c >= 0."""
        return self.scale >= 0

    @property
    def damping(self) -> float:
        """The multiple c itself."""
        return self.scale
