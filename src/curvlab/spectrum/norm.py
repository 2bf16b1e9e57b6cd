"""Frobenius norm from products."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from curvlab.arguments import whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, checked_product, generator_for
from curvlab.linalg.vectors import Distribution
from curvlab.seeding import Seed
from curvlab.spectrum.trace import Estimate, Forms, FormsState


def frobenius_norm(
    operator: LinearOperator,
    *,
    num_matvecs: int,
    batch_size: int | None = None,
    chunk_size: int = 32,
    distribution: Distribution = "rademacher",
    progress: bool = True,
    callback: Callable[[FormsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> Estimate:
    """Estimate ‖A‖_F as the root of the mean of (A' z)ᵀ(A'' z) (Klochkov & Liu 2024, App. C).

    A' = A'' = A by default. With `batch_size`, A' and A'' are two independent batches, a new pair for each
    probe: one batch, ‖A' z‖², would add the sampling variance to the answer. The square is unbiased; the
    root and its standard error follow to first order, so give the square, value², where unbiasedness matters.

    Args:
        operator: A, (P, P).
        num_matvecs: products in all; with `batch_size` two for each probe.
        batch_size: examples in each of the two batches; None for products with A itself.
        chunk_size: columns a product, without `batch_size`.
        distribution: of the probes.
        progress: show a bar.
        callback: called with the state after each step, a chunk.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`, or a pair of batches.
        generator: the only source of randomness; required with `checkpoint`.

    Where sampling noise makes the mean square negative, value is 0 and stderr tells how little that means.

    >>> import torch
    >>> from curvlab.linalg import DenseOperator
    >>> frobenius_norm(DenseOperator(torch.diag(torch.tensor([3.0, 4.0]))), num_matvecs=2).value
    5.0
    """
    generator = generator_for(operator, generator)
    per_probe = 1 if batch_size is None else 2
    whole("num_matvecs", num_matvecs, least=per_probe)
    whole("chunk_size", chunk_size)
    num_probes = num_matvecs // per_probe
    width = chunk_size if batch_size is None else 1

    def forms(probes: Tensor) -> Tensor:
        if batch_size is None:
            products = checked_product(operator, probes)
            return operator.inner(products, products)
        pair = [checked_product(operator.sample(batch_size, generator), probes) for _ in range(2)]
        return operator.inner(*pair)

    work = Forms(operator, forms, num_probes, width, distribution, generator, batch_size)
    samples = iterate(work, name="Frobenius norm", progress=progress, callback=callback, checkpoint=checkpoint)
    square = Estimate.from_samples(samples, num_probes * per_probe)
    value = math.sqrt(max(square.value, 0.0))
    # d sqrt(s) = ds / (2 sqrt(s)), but never more than the root of the error where the square is mere noise.
    stderr = square.stderr / max(2 * value, math.sqrt(square.stderr)) if square.stderr > 0 else square.stderr
    return Estimate(value, stderr, square.num_matvecs)
