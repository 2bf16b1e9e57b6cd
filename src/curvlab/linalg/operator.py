"""The core abstraction: a symmetric operator is a size, a dtype, a device and a product.

Sums, multiples and the identity stand here too, because `+` and `*` of operators make them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from torch import Tensor

from curvlab.ranks import Ranks
from curvlab.seeding import Seed, as_generator


class LinearOperator(ABC):
    """Symmetric linear map on flat vectors, (P,) -> (P,) or column by column (P, K) -> (P, K).

    Subclasses implement `matmat`; everything else (algebra, inner products, conversion) follows. Inner
    products belong to the operator, not to the tensors: an operator whose vectors are sharded over ranks
    overrides `gram` and `randn`, and every solver works on it unchanged.

    Attributes:
        shape: (P, P).
        num_rows: numbers of a vector that this process holds: P, or fewer where others hold the rest.
        dtype: dtype of the vectors it accepts and returns.
        device: device of those vectors.
        ranks: the processes that make the same calls in the same order, where examples or vectors are spread over
            several; this one alone otherwise.
    """

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.shape = (size, size)
        self.num_rows = size
        self.dtype = dtype
        self.device = torch.device(device)
        self.ranks = Ranks()

    def __repr__(self) -> str:
        size, damping = f"{self.shape[0]:,} parameters", f"damping {self.damping:g}"
        return f"<{type(self).__name__} over {size}, {damping}, {self.dtype} on {self.device}>"

    # ---------------------------------------------------------------------------------- products
    @abstractmethod
    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P, K) -> (P, K)."""

    def matvec(self, vector: Tensor) -> Tensor:
        """Return A v, (P,) -> (P,)."""
        return self.matmat(vector[:, None])[:, 0]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.check_vectors(vectors)
        return self.matvec(vectors) if vectors.ndim == 1 else self.matmat(vectors)

    def check_vectors(self, vectors: Tensor, name: str = "the right-hand side") -> None:
        """Raise a ValueError that names the mismatch unless `vectors` is (P,) or (P, K) of our dtype."""
        size = self.num_rows
        if not isinstance(vectors, Tensor):
            raise TypeError(f"{name} is a {type(vectors).__name__}: pass a tensor, torch.as_tensor(...)")
        if vectors.ndim not in (1, 2) or vectors.shape[0] != size:
            raise ValueError(
                f"{name} has shape {tuple(vectors.shape)}, but {type(self).__name__} acts on vectors of "
                f"length {size}: pass ({size},) or ({size}, K). Parameters are flattened in "
                "named_parameters() order, only those that require gradients (curvlab.linalg.flatten)."
            )
        if vectors.dtype != self.dtype or vectors.device != self.device:
            raise ValueError(
                f"{name} is {vectors.dtype} on {vectors.device}, but {type(self).__name__} is {self.dtype} "
                f"on {self.device}: convert it with .to(op.device, op.dtype), or convert the model."
            )

    # -------------------------------------------------------------------------------- properties
    @property
    def is_psd(self) -> bool:
        """Whether the operator is known to be positive semi-definite; False when it is not known."""
        return False

    @property
    def way_out(self) -> str:
        """What to do where it is not positive semi-definite, for error messages."""
        return (
            "Use GaussNewtonOperator, or add damping larger than |lambda_min|: op + damping * identity "
            "(curvlab.spectrum.top_eigenvalues(-op) measures -lambda_min)."
        )

    @property
    def damping(self) -> float:
        """The multiple of the identity that was added, e.g. 0.1 for `op + 0.1 * identity`."""
        return 0.0

    @property
    def num_examples(self) -> int | None:
        """N, how many examples `sample` draws from; None for an operator that is no mean over examples."""
        return None

    # ----------------------------------------------------------------------------- inner product
    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return LᵀR, (P, K), (P, L) -> (K, L); the only reduction over parameters that solvers use."""
        return left.T @ right

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return <l, r>: () for two (P,) vectors, (K,) column by column for two (P, K)."""
        return (left * right).sum(0)

    def norm(self, vectors: Tensor) -> Tensor:
        """Return the norm of each column: () or (K,)."""
        return self.inner(vectors, vectors).sqrt()

    def randn(self, num_columns: int, generator: Seed = None) -> Tensor:
        """Return (P, num_columns) independent standard normals, drawn on the generator's device."""
        generator = as_generator(generator)
        source = generator.device if generator is not None else torch.device("cpu")
        # One column after the other in the generator's order: neither our device nor a sharding changes them.
        drawn = torch.randn(num_columns, self.shape[0], generator=generator, dtype=self.dtype, device=source)
        return drawn.to(self.device).T.contiguous()

    def tensor_slices(self, sizes: Sequence[int]) -> list[slice]:
        """Return where the numbers of each parameter tensor lie among those of a vector that this process holds.

        Args:
            sizes: numbers of each whole tensor, P in all.
        """
        if self.num_rows != self.shape[0]:
            raise ValueError(f"{type(self).__name__} does not say how its vectors, cut up over processes, are cut")
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def probe(self) -> Tensor:
        """Return ‖A v‖ and up to 4,096 numbers of A v for one fixed v, fp64 on the CPU: what tells A from others.

        Cost: one product.
        """
        product = self @ self.randn(1, torch.Generator().manual_seed(0))
        some = product[:: max(1, -(-len(product) // 4096)), 0]  # a rank may hold no row
        return torch.cat([self.norm(product), some]).double().cpu()

    # ---------------------------------------------------------------------------------- sampling
    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> LinearOperator:
        """Return the operator on one random batch, unbiased for this one.

        Examples are drawn uniformly, or with `probabilities`, (N,), and then weighted so that the mean
        stays (`ExampleDraws`). The sample of a sample is a sample of the whole data again, with the whole data's
        scale.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no data to sample a batch from; use a solver without batches "
            "(ConjugateGradient, Direct), or an operator of curvlab.curvature."
        )

    # ----------------------------------------------------------------------------------- algebra
    def __add__(self, other: LinearOperator | Identity) -> SumOperator:
        if not isinstance(other, LinearOperator | Identity):
            _refuse_to_add(self, other)
        term = other if isinstance(other, LinearOperator) else other.like(self)
        return SumOperator([*_terms(self), *_terms(term)])

    __radd__ = __add__

    def __sub__(self, other: LinearOperator | Identity) -> SumOperator:
        return self + (-1.0) * other

    def __mul__(self, scale: float) -> ScaledOperator:
        return ScaledOperator(_finite(scale), self)

    __rmul__ = __mul__

    def __neg__(self) -> ScaledOperator:
        return -1.0 * self

    # -------------------------------------------------------------------------------- conversion
    def to_dense(self, *, chunk_size: int = 256) -> Tensor:
        """Return the (P, P) matrix, `chunk_size` columns at a time. Cost: P products, P² memory."""
        size = self.shape[0]
        dense = torch.empty(size, size, dtype=self.dtype, device=self.device)
        for start in range(0, size, chunk_size):
            stop = min(start + chunk_size, size)
            columns = torch.zeros(size, stop - start, dtype=self.dtype, device=self.device)
            columns[torch.arange(start, stop), torch.arange(stop - start)] = 1.0
            dense[:, start:stop] = self.matmat(columns)
        return dense

    def to_scipy(self) -> ScipyLinearOperator:
        """Return a `scipy.sparse.linalg.LinearOperator` on NumPy arrays of the same dtype."""
        if self.dtype == torch.bfloat16:
            raise TypeError(
                "NumPy has no bfloat16: build the operator on the model in single precision, model.float(), "
                "to use it with SciPy."
            )
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype

        def apply(vectors: np.ndarray) -> np.ndarray:
            as_tensor = torch.from_numpy(np.ascontiguousarray(vectors, dtype=dtype)).to(self.device)
            return (self @ as_tensor).detach().cpu().numpy()

        def apply_vector(vector: np.ndarray) -> np.ndarray:  # scipy passes (P,) or (P, 1)
            return apply(vector.reshape(-1))

        return ScipyLinearOperator(
            shape=self.shape, matvec=apply_vector, rmatvec=apply_vector, matmat=apply, rmatmat=apply, dtype=dtype
        )


class DerivedOperator(LinearOperator):
    """An operator on the vectors of another: size, dtype, device, inner products and random vectors are its.

    Args:
        origin: the operator they are taken from.
    """

    def __init__(self, origin: LinearOperator) -> None:
        super().__init__(origin.shape[0], dtype=origin.dtype, device=origin.device)
        self.num_rows, self.ranks = origin.num_rows, origin.ranks
        self.origin = origin

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of `origin`."""
        return self.origin.gram(left, right)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of `origin`, column by column."""
        return self.origin.inner(left, right)

    def randn(self, num_columns: int, generator: Seed = None) -> Tensor:
        """Return the random vectors of `origin`."""
        return self.origin.randn(num_columns, generator)

    def tensor_slices(self, sizes: Sequence[int]) -> list[slice]:
        """Return those of `origin`."""
        return self.origin.tensor_slices(sizes)


class ScaledOperator(DerivedOperator):
    """c·A for a number c."""

    def __init__(self, scale: float, operator: LinearOperator) -> None:
        super().__init__(operator)
        self.scale = scale
        self.operator = operator

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return c A V."""
        return self.scale * self.operator.matmat(vectors)

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> ScaledOperator:
        """Return c times a sample of A."""
        return ScaledOperator(self.scale, _sample(self.operator, batch_size, generator, probabilities))

    @property
    def is_psd(self) -> bool:
        """Whether A is known to be, and c >= 0."""
        return self.scale >= 0 and self.operator.is_psd

    @property
    def way_out(self) -> str:
        """That of A, unless c makes it negative."""
        return self.operator.way_out if self.scale >= 0 else super().way_out

    @property
    def damping(self) -> float:
        """The damping of A, times c."""
        return self.scale * self.operator.damping

    @property
    def num_examples(self) -> int | None:
        """The number of examples of A."""
        return self.operator.num_examples


class SumOperator(DerivedOperator):
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
        super().__init__(first)
        self.terms = tuple(terms)

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the sum of the products. Cost: that of every term."""
        return reduce(torch.add, (term.matmat(vectors) for term in self.terms))

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> SumOperator:
        """Return the sum of samples of the terms, each drawn independently and unbiased."""
        return SumOperator([_sample(term, batch_size, generator, probabilities) for term in self.terms])

    def probe(self) -> Tensor:
        """Return that of the terms without damping, which is known as a number and would drown what they say."""
        terms = [term for term in self.terms if not isinstance(term, IdentityOperator)]
        return super().probe() if len(terms) in (0, len(self.terms)) else SumOperator(terms).probe()

    @property
    def is_psd(self) -> bool:
        """Whether every term is known to be."""
        return all(term.is_psd for term in self.terms)

    @property
    def way_out(self) -> str:
        """That of the first term that is not positive semi-definite."""
        return next((term.way_out for term in self.terms if not term.is_psd), super().way_out)

    @property
    def damping(self) -> float:
        """The sum of the terms' damping."""
        return sum(term.damping for term in self.terms)

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the term that has most; None where no term has any."""
        return max((term.num_examples for term in self.terms if term.num_examples is not None), default=None)


class Identity:
    """A multiple of the identity that takes its size from the operator it is added to.

    `op + damping * identity` is the only way damping enters: a solver receives the matrix it inverts.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __mul__(self, factor: float) -> Identity:
        return Identity(self.scale * _finite(factor))

    __rmul__ = __mul__

    def __add__(self, other: LinearOperator) -> SumOperator:
        if not isinstance(other, LinearOperator):
            _refuse_to_add(self, other)
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


def generator_for(operator: LinearOperator, generator: Seed) -> torch.Generator | None:
    """Return the source of an operator's random numbers, or raise a TypeError for what is no operator."""
    return as_generator(generator, checked_operator(operator).device)


def checked_operator(operator: LinearOperator) -> LinearOperator:
    """Return the operator, or raise a TypeError that says how one is made."""
    if not hasattr(operator, "check_vectors"):
        raise TypeError(
            f"the matrix is a {type(operator).__name__}: pass an operator, GaussNewtonOperator(model, loss, data) "
            "of a model, curvlab.linalg.DenseOperator(matrix) of a tensor"
        )
    return operator


def _finite(factor: object) -> float:
    if isinstance(factor, str | bytes):
        raise TypeError(
            f"operators are multiplied by numbers, such as the damping in `op + 0.1 * identity`, got {factor!r}"
        )
    if not math.isfinite(number := float(factor)):  # type: ignore[arg-type]  # numbers of any kind, also tensors
        raise ValueError(f"operators are multiplied by finite numbers, such as the damping, got {number}")
    return number


def _refuse_to_add(left: object, right: object) -> NoReturn:
    names = [str(term) if isinstance(term, int | float) else type(term).__name__ for term in (left, right)]
    raise TypeError(
        f"cannot add {names[0]} and {names[1]}: operators are added to operators, and damping as in "
        "`op + 0.1 * identity`; DenseOperator makes an operator of a matrix."
    )


def _sample(
    operator: LinearOperator, batch_size: int, generator: torch.Generator | None, probabilities: Tensor | None
) -> LinearOperator:
    given = () if probabilities is None else (probabilities,)  # operators of users may know uniform batches alone
    return operator.sample(batch_size, generator, *given)


def _terms(operator: LinearOperator) -> tuple[LinearOperator, ...]:
    return operator.terms if isinstance(operator, SumOperator) else (operator,)
