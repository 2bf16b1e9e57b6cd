"""A matrix as an operator: for oracles, small problems and synthetic spectra."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from curvlab.arguments import tensor
from curvlab.linalg.draws import ExampleDraws
from curvlab.linalg.operator import LinearOperator


class DenseOperator(LinearOperator):
    """A symmetric matrix, or the mean of N symmetric matrices from which batches can be sampled.

    Args:
        matrix: (P, P), or (N, P, P), whose mean over the first axis is the operator.
        is_psd: state it when it is known; by default it is decided from the eigenvalues (O(P³), once).
    """

    def __init__(self, matrix: Tensor, *, is_psd: bool | None = None) -> None:
        if tensor("matrix", matrix).ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(f"need a (P, P) or (N, P, P) tensor, got shape {tuple(matrix.shape)}")
        if not matrix.is_floating_point():
            raise TypeError(f"the matrix is {matrix.dtype}: pass floating-point numbers, matrix.float()")
        mean = matrix if matrix.ndim == 2 else matrix.mean(0)
        if not torch.allclose(mean, mean.T, rtol=1e-5, atol=1e-8):
            if not bool(matrix.isfinite().all()):
                raise ValueError("the matrix holds NaN or infinity")
            raise ValueError("the matrix is not symmetric; pass (A + A.T) / 2 if the difference is rounding")
        super().__init__(mean.shape[0], dtype=mean.dtype, device=mean.device)
        self.matrix = mean
        self.examples = matrix if matrix.ndim == 3 else None
        self._is_psd = is_psd

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V. Cost: P²K."""
        return self.matrix @ vectors

    @property
    def is_psd(self) -> bool:
        """As stated at construction, or whether the smallest eigenvalue is nonnegative up to rounding."""
        if self._is_psd is None:
            eigenvalues = torch.linalg.eigvalsh(self.matrix)
            tolerance = 10 * torch.finfo(self.dtype).eps * eigenvalues.abs().max() * len(eigenvalues)
            self._is_psd = bool(eigenvalues.min() >= -tolerance)
        return self._is_psd

    @property
    def num_examples(self) -> int | None:
        """N; None for a single matrix."""
        return None if self.examples is None else len(self.examples)

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> DenseOperator:
        """Return the mean of `batch_size` of the N matrices, drawn with replacement; it can be sampled again.

        With probabilities q, matrix i is drawn with q_i and divided by N q_i.
        """
        if self.examples is None:
            return super().sample(batch_size, generator)  # type: ignore[return-value]  # raises
        if probabilities is not None:
            places, factors = ExampleDraws(probabilities, len(self.examples)).draw(batch_size, generator)
            sampled = copy.copy(self)
            chosen = self.examples[places.to(self.device)]
            sampled.matrix = (factors.to(chosen)[:, None, None] * chosen).mean(0)
            return sampled
        source = generator.device if generator is not None else "cpu"
        drawn = torch.randint(len(self.examples), (batch_size,), generator=generator, device=source)
        sampled = copy.copy(self)
        sampled.matrix = self.examples[drawn.to(self.device)].mean(0)
        return sampled
