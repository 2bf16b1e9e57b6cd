"""Sums and multiples of operators, and the identity that damping is written with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab.linalg.operator import LinearOperator


class _Identity:
    """A multiple of the identity that takes its size from the operator it is added to.

    `op + damping * identity` is the only way damping enters: a solver receives the matrix it inverts.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __mul__(self, factor: float) -> _Identity:
        return _Identity(self.scale * float(factor))

    __rmul__ = __mul__

    def __add__(self, other: LinearOperator) -> SumOperator:
        return add(other, self)

    def __repr__(self) -> str:
        return f"{self.scale:g} * identity"

    def like(self, operator: LinearOperator) -> IdentityOperator:
        """Return this multiple of the identity with the size, dtype and device of `operator`."""
        return IdentityOperator(operator.shape[0], scale=self.scale, dtype=operator.dtype, device=operator.device)


identity = _Identity()


class IdentityOperator(LinearOperator):
    """c·I of a definite size."""

    def __init__(self, size: int, *, scale: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(size, dtype=dtype, device=device)
        self.scale = scale

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return c V. Cost: one multiplication."""
        return self.scale * vectors

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> IdentityOperator:
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


class ScaledOperator(LinearOperator):
    """c·A for a number c."""

    def __init__(self, scale: float, operator: LinearOperator) -> None:
        super().__init__(operator.shape[0], dtype=operator.dtype, device=operator.device)
        self.scale = scale
        self.operator = operator

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return c A V."""
        return self.scale * self.operator.matmat(vectors)

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of the operator that is scaled."""
        return self.operator.gram(left, right)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of the operator that is scaled."""
        return self.operator.inner(left, right)

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the random vectors of the operator that is scaled."""
        return self.operator.randn(num_columns, generator)

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> ScaledOperator:
        """Return c times a sample of A."""
        return ScaledOperator(self.scale, self.operator.sample(batch_size, generator))

    @property
    def is_psd(self) -> bool:
        """Whether A is known to be, and c >= 0."""
        return self.scale >= 0 and self.operator.is_psd

    @property
    def damping(self) -> float:
        """The damping of A, times c."""
        return self.scale * self.operator.damping


class SumOperator(LinearOperator):
    """A_1 + ... + A_m. Inner products are those of the first term."""

    def __init__(self, terms: Sequence[LinearOperator]) -> None:
        first = terms[0]
        for term in terms[1:]:
            if (term.shape, term.dtype, term.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"cannot add {type(term).__name__} {term.shape} {term.dtype} on {term.device} to "
                    f"{type(first).__name__} {first.shape} {first.dtype} on {first.device}: both must act on "
                    "the same parameters. Check which parameters require gradients."
                )
        super().__init__(first.shape[0], dtype=first.dtype, device=first.device)
        self.terms = tuple(terms)

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the sum of the products. Cost: that of every term."""
        total = self.terms[0].matmat(vectors)
        for term in self.terms[1:]:
            total = total + term.matmat(vectors)
        return total

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of the first term."""
        return self.terms[0].gram(left, right)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of the first term."""
        return self.terms[0].inner(left, right)

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the random vectors of the first term."""
        return self.terms[0].randn(num_columns, generator)

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> SumOperator:
        """Return the sum of samples of the parts, each drawn independently and unbiased."""
        return SumOperator([term.sample(batch_size, generator) for term in self.terms])

    @property
    def is_psd(self) -> bool:
        """Whether every term is known to be."""
        return all(term.is_psd for term in self.terms)

    @property
    def damping(self) -> float:
        """The sum of the terms' damping."""
        return sum(term.damping for term in self.terms)


def add(left: LinearOperator, right: LinearOperator | _Identity) -> SumOperator:
    """Return left + right as one flat sum; an identity takes the size of the other term."""
    if not isinstance(left, LinearOperator) or not isinstance(right, LinearOperator | _Identity):
        raise TypeError(
            f"cannot add {_name(left)} and {_name(right)}: operators are added to operators, and damping as in "
            "`op + 0.1 * identity`; DenseOperator makes an operator of a matrix."
        )
    resolved = right.like(left) if isinstance(right, _Identity) else right
    left_terms = left.terms if isinstance(left, SumOperator) else (left,)
    right_terms = resolved.terms if isinstance(resolved, SumOperator) else (resolved,)
    return SumOperator([*left_terms, *right_terms])


def _name(term: object) -> str:
    return str(term) if isinstance(term, int | float) else type(term).__name__
