"""The core abstraction: a symmetric operator is a size, a dtype, a device and a product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.linalg.algebra import ScaledOperator, SumOperator, _Identity


class LinearOperator(ABC):
    """Symmetric linear map on flat vectors, (P,) -> (P,) or column by column (P, K) -> (P, K).

    Subclasses implement `matmat`; everything else (algebra, inner products, conversion) follows. Inner
    products belong to the operator, not to the tensors: an operator whose vectors are sharded over ranks
    overrides `gram` and `randn`, and every solver works on it unchanged.

    Attributes:
        shape: (P, P).
        dtype: dtype of the vectors it accepts and returns.
        device: device of those vectors.
    """

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.shape = (size, size)
        self.dtype = dtype
        self.device = torch.device(device)

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
        size = self.shape[0]
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
    def damping(self) -> float:
        """The multiple of the identity that was added, e.g. 0.1 for `op + 0.1 * identity`."""
        return 0.0

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

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        """Return (P, num_columns) independent standard normals, drawn on the generator's device."""
        source = generator.device if generator is not None else torch.device("cpu")
        # Drawn row by column in the generator's own order, so a device or a sharding does not change them.
        drawn = torch.randn(num_columns, self.shape[0], generator=generator, dtype=self.dtype, device=source)
        return drawn.to(self.device).T.contiguous()

    # ---------------------------------------------------------------------------------- sampling
    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> LinearOperator:
        """Return the operator on one random batch, unbiased for this one.

        The sample of a sample is a sample of the whole data again, with the whole data's scale.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no data to sample a batch from; use a solver without batches "
            "(ConjugateGradient, Direct), or an operator of curvlab.curvature."
        )

    # ----------------------------------------------------------------------------------- algebra
    def __add__(self, other: LinearOperator | _Identity) -> SumOperator:
        from curvlab.linalg.algebra import add

        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: LinearOperator | _Identity) -> SumOperator:
        return self + (-1.0) * other

    def __mul__(self, scale: float) -> ScaledOperator:
        from curvlab.linalg.algebra import ScaledOperator

        return ScaledOperator(float(scale), self)

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
        numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype

        def apply(vectors: np.ndarray) -> np.ndarray:
            as_tensor = torch.from_numpy(np.ascontiguousarray(vectors, dtype=numpy_dtype)).to(self.device)
            return (self @ as_tensor).detach().cpu().numpy()

        def apply_vector(vector: np.ndarray) -> np.ndarray:  # scipy passes (P,) or (P, 1)
            return apply(vector.reshape(-1))

        return ScipyLinearOperator(
            shape=self.shape,
            matvec=apply_vector,
            rmatvec=apply_vector,
            matmat=apply,
            rmatmat=apply,
            dtype=numpy_dtype,
        )
