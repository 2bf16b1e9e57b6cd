"""The diagonal from products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, checked_product, draw_probes, generator_for
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted


@dataclass(frozen=True, repr=False)
class Diagonal(Shown):
    """The diagonal of a matrix, entry by entry.

    Attributes:
        values: (P,), in the operator's dtype.
        stderr: (P,), standard errors over independent probes; nan for one probe.
        num_matvecs: products paid for, counted per vector.
    """

    values: Tensor
    stderr: Tensor
    num_matvecs: int

    def summary(self) -> Summary:
        """Return the range of the values, their mean error and the cost."""
        error = float(self.stderr.double().mean())
        about = "no error: a single probe" if math.isnan(error) else f"± {error:.2g} on average, over probes"
        return Summary(
            "diagonal",
            f"from {float(self.values.min()):.4g} to {float(self.values.max()):.4g}",
            f"{about}, {counted(len(self.values), 'number')}",
            (counted(self.num_matvecs, "product"),),
        )


@dataclass(frozen=True)
class DiagonalState:
    """Sums over the probes so far.

    Attributes:
        mean: (P,), of z ⊙ A z.
        squares: (P,), sums of squared distances from the mean.
        generator: what draws the probes.
        count: probes so far.
        num_steps: chunks of them.
    """

    mean: Tensor
    squares: Tensor
    generator: torch.Generator | None
    count: int = 0
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Probes:
    operator: LinearOperator
    num_matvecs: int
    chunk_size: int
    generator: torch.Generator | None

    def depends_on(self) -> Mapping[str, Any]:
        settings = (self.num_matvecs, self.chunk_size)
        return {"operator": self.operator, "generator": self.generator, "settings": settings}

    def init(self) -> DiagonalState:
        op = self.operator
        zeros = torch.zeros(op.num_rows, dtype=op.dtype, device=op.device)
        return DiagonalState(zeros, zeros, self.generator)

    def step(self, state: DiagonalState) -> DiagonalState:
        width = min(self.chunk_size, self.num_matvecs - state.count)
        probes = draw_probes(self.operator, width, generator=state.generator)
        found = probes * checked_product(self.operator, probes)
        count, chunk = state.count + width, found.mean(1)
        # Means and squares of two parts put together (Chan, Golub & LeVeque 1979): sums of squares would cancel.
        apart = chunk - state.mean
        squares = state.squares + (found - chunk[:, None]).square().sum(1)
        return replace(
            state,
            mean=state.mean + apart * (width / count),
            squares=squares + apart.square() * (state.count * width / count),
            count=count,
            num_steps=state.num_steps + 1,
            done=count >= self.num_matvecs,
        )

    def result(self, state: DiagonalState) -> Diagonal:
        count = state.count
        stderr = torch.full_like(state.mean, math.nan)
        if count > 1:
            stderr = (state.squares / (count * (count - 1))).sqrt()
        return Diagonal(state.mean, stderr, count)


def hutchinson_diagonal(
    operator: LinearOperator,
    *,
    num_matvecs: int,
    chunk_size: int = 32,
    progress: bool = True,
    callback: Callable[[DiagonalState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> Diagonal:
    """Estimate diag(A) as the mean of z_i ⊙ A z_i, z_i random signs (Bekas, Kokiopoulou & Saad 2007); unbiased.

    Entry i has the variance sum_{j ≠ i} A_ij² / num_matvecs: exact for a diagonal matrix, and of little use where
    a row's other entries are much longer than its diagonal one. The `stderr` of each entry tells.

    Args:
        operator: A, (P, P).
        num_matvecs: probes.
        chunk_size: columns of each product.
        progress: show a bar.
        callback: called with the state after each step, a chunk.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: one product for each probe; memory of 3 `chunk_size` vectors.

    >>> from curvlab.linalg import DenseOperator
    >>> hutchinson_diagonal(DenseOperator(torch.diag(torch.arange(4.0))), num_matvecs=2).values
    tensor([0., 1., 2., 3.])
    """
    generator = generator_for(operator, generator)
    whole("num_matvecs", num_matvecs)
    whole("chunk_size", chunk_size)
    work = _Probes(operator, num_matvecs, chunk_size, generator)
    total = math.ceil(num_matvecs / chunk_size)
    return iterate(work, name="diagonal", total=total, progress=progress, callback=callback, checkpoint=checkpoint)
