"""Largest eigenvalues from a Gaussian sketch, as the paper on LiSSA estimates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, checked_product, generator_for
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted, first_values
from curvlab.spectrum.eigenvalues import vectors_that_fit

_COPIES = 6  # of a chunk of rows: itself, its part of one tensor, the product and its input, the other rows drawn


@dataclass(frozen=True, repr=False)
class SketchedEigenvalues(Shown):
    """The k largest eigenvalues as a sketch sees them.

    Attributes:
        values: (k,), fp64 on the CPU, bias corrected to first order.
        bias: (k,), what that correction took off the sketch's own eigenvalues: tr(A)/d for a dense one.
        stderr: (k,), spread over the random sketch to first order: value sqrt(2/d) for a dense one. Neighbours
            push each other by up to about ‖A‖_F / sqrt(d) (Swartworth & Woodruff 2023): that bias is left in
            the values and out of the stderr. It is upwards for the largest, and small for one far above the rest.
        sketch: Φ A Φᵀ, (d, d), or (L d, L d) for the per-tensor form, fp64 on the CPU.
        num_matvecs: products paid for: the number of rows of the sketch.
    """

    values: Tensor
    bias: Tensor
    stderr: Tensor
    sketch: Tensor
    num_matvecs: int

    def summary(self) -> Summary:
        """Return the first values, the largest standard error and the cost."""
        return Summary(
            "largest eigenvalues by a sketch",
            first_values(self.values),
            f"± {float(self.stderr.max()):.2g} at most, over random sketches",
            (counted(self.num_matvecs, "product"),),
        )


def sketch_eigenvalues(
    operator: LinearOperator,
    k: int = 1,
    *,
    sketch_size: int,
    tensor_sizes: Sequence[int] | None = None,
    chunk_size: int = 32,
    memory_budget: float | None = None,
    progress: bool = True,
    callback: Callable[[SketchState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> SketchedEigenvalues:
    """Estimate the k largest eigenvalues of A from Φ A Φᵀ, Φ_ij ~ N(0, 1/d) (Klochkov & Liu 2024, App. C).

    λ_i(A) is estimated by λ_i(Â) - tr(Â)/d. With `tensor_sizes`, Φ is block-diagonal, one (d, P_l) block a
    parameter tensor (the paper's "concatenated" form): L d rows from random numbers for d only. There the
    correction is sum_l ‖s_l‖² tr(Â_ll)/d, s the sketch's eigenvector, of which the dense one is the case L = 1.

    What concatenation saves is the drawing of Φ, not products with A: it takes L d of them, and with equal masses
    in all tensors its variance is that of a dense sketch with L d rows; with all mass in one, that of d rows.

    Φ is never stored: its rows are drawn from a seed, again whenever they are needed. For the largest
    eigenvalue alone `top_eigenvalues` needs far fewer products and bounds its error.

    Args:
        operator: A, (P, P).
        k: how many.
        sketch_size: d.
        tensor_sizes: P_1, ..., P_L, numel of each parameter in order, whole where vectors are cut up over
            processes; None for the dense sketch.
        chunk_size: rows drawn together, from a seed of their own: another one gives another Φ. Of 1: see
            memory_budget.
        memory_budget: bytes for vectors; by default 80 % of what is free. Where chunks do not fit, or are of 1,
            each row is drawn from its own seed, on the operator's device, and products are held for as many rows
            as fit, g: the numbers depend neither on g nor on the budget.
        progress: show a bar.
        callback: called with the state after each step, a chunk of rows.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`. A checkpoint is
            refused where there was room for chunks, and is no more, or the other way round: they are other random
            numbers.
        generator: draws the seed; required with `checkpoint`.

    Cost: d (or L d) products, and d/chunk_size times the drawing of Φ; memory of 6 chunk_size vectors. Row by row,
    the drawing of Φ d/(2 g) times (d L/g); memory of 2 g + 3 vectors, 5 at least.
    """
    generator = generator_for(operator, generator)
    sizes = list(tensor_sizes) if tensor_sizes is not None else [operator.shape[0]]
    if sum(sizes) != operator.shape[0] or min(sizes) < 1:
        raise ValueError(
            f"tensor_sizes must be positive and add up to {operator.shape[0]}, got a sum of {sum(sizes)}: "
            "[p.numel() for p in model.parameters() if p.requires_grad]"
        )
    num_rows = len(sizes) * whole("sketch_size", sketch_size)
    whole("chunk_size", chunk_size)
    if not 1 <= whole("k", k, least=0) <= num_rows:
        raise ValueError(f"k must be between 1 and the sketch's {num_rows} rows, got {k}")
    slices = operator.tensor_slices(sizes) if len(sizes) > 1 else [slice(0, operator.num_rows)]
    fitting, chunk = vectors_that_fit(operator, memory_budget), min(chunk_size, sketch_size)
    in_rows = chunk_size == 1 or fitting < _COPIES * chunk
    group = min(num_rows, max(1, (fitting - 3) // 2)) if in_rows else chunk_size
    work = (_RowByRow if in_rows else _ChunkByChunk)(operator, slices, sketch_size, group, generator)
    sketch = iterate(work, name="sketch", progress=progress, callback=callback, checkpoint=checkpoint)
    sketch = (sketch + sketch.T) / (2 * sketch_size)
    values, bias, stderr = _corrected(sketch, len(sizes))
    return SketchedEigenvalues(values[:k], bias[:k], stderr[:k], sketch, num_rows)


@dataclass
class SketchState:
    """How far a sketch is.

    Attributes:
        sketch: d Φ A Φᵀ, as far as it is known.
        num_columns: how many columns are.
        num_steps: chunks of them.
    """

    sketch: Tensor
    num_columns: int = 0
    num_steps: int = 0

    @property
    def done(self) -> bool:
        """Whether there are all columns."""
        return self.num_columns == len(self.sketch)


class _Columns:
    """A method for `iterate`: columns of the sketch, some at a time.

    Args:
        operator: A.
        slices: of the tensors.
        sketch_size: d.
        group: rows of Φ at a time.
        generator: draws the seed of Φ.
    """

    def __init__(
        self,
        operator: LinearOperator,
        slices: list[slice],
        sketch_size: int,
        group: int,
        generator: torch.Generator | None,
    ) -> None:
        self.operator, self.slices, self.sketch_size, self.group = operator, slices, sketch_size, group
        self.generator = generator

    def depends_on(self) -> Mapping[str, Any]:
        settings = (type(self).__name__, self.slices, self.sketch_size, self.drawn_together)
        return {"operator": self.operator, "generator": self.generator, "settings": settings}

    def init(self) -> SketchState:
        source = self.generator.device if self.generator is not None else torch.device("cpu")
        seed = int(torch.randint(2**62, (1,), generator=self.generator, device=source))
        self.rows = _Rows(self.operator, self.sketch_size, self.drawn_together, seed, source)
        num_rows = len(self.slices) * self.sketch_size
        return SketchState(torch.zeros(num_rows, num_rows, dtype=torch.float64))

    @property
    def drawn_together(self) -> int:
        """Rows of Φ from one seed."""
        return self.group

    def step(self, state: SketchState) -> SketchState:
        raise NotImplementedError

    def expected_steps(self, state: SketchState) -> float | None:
        return state.num_steps * len(state.sketch) / state.num_columns if state.num_columns else None

    def result(self, state: SketchState) -> Tensor:
        return state.sketch


class _ChunkByChunk(_Columns):
    """Chunks of Φ drawn together, multiplied tensor by tensor."""

    drawn: tuple[int, Tensor] | None = None  # the chunk at work, and its first row

    def step(self, state: SketchState) -> SketchState:
        number, tensor = divmod(state.num_steps, len(self.slices))
        at, part, sketch = number * self.group, self.slices[tensor], state.sketch
        if self.drawn is None or self.drawn[0] != at:
            self.drawn = at, self.rows.draw(at, min(self.group, self.sketch_size - at))
        chunk = self.drawn[1]
        vectors = torch.zeros_like(chunk)
        vectors[part] = chunk[part]
        products = checked_product(self.operator, vectors)
        columns = slice(tensor * self.sketch_size + at, tensor * self.sketch_size + at + chunk.shape[1])
        for other_at, other in self.rows:
            for other_tensor, other_part in enumerate(self.slices):
                start = other_tensor * self.sketch_size + other_at
                overlap = self.operator.gram(other[other_part], products[other_part])
                sketch[start : start + other.shape[1], columns] = overlap.double().cpu()
        state.num_columns += chunk.shape[1]
        state.num_steps += 1
        return state


class _RowByRow(_Columns):
    """Each row of Φ from a seed of its own, so that the numbers do not depend on how many are held."""

    drawn_together = 1

    def init(self) -> SketchState:
        state = super().init()
        self.rows.source = self.operator.device
        return state

    def step(self, state: SketchState) -> SketchState:
        op, size, slices = self.operator, self.sketch_size, self.slices
        dense, start = len(slices) == 1, state.num_columns
        places = range(start, min(start + self.group, len(state.sketch)))
        # A vector a row, as a product takes them: it makes no copy.
        vectors = torch.zeros(len(places), op.num_rows, dtype=op.dtype, device=op.device)
        for vector, place in zip(vectors, places, strict=True):
            part = slices[place // size] if not dense else slice(None)
            vector[part] = self.rows.draw(place % size, 1)[part, 0]
        products = checked_product(op, vectors.T)
        del vectors, vector
        for at in range(start if dense else 0, size):  # the dense one is symmetric: half of the drawing
            other = self.rows.draw(at, 1)
            for tensor, part in enumerate(slices if not dense else [slice(None)]):
                overlap = op.gram(other[part], products[part])
                state.sketch[tensor * size + at, start : places.stop] = overlap[0].double().cpu()
            del other
        state.num_columns = places.stop
        state.num_steps += 1
        return state

    def result(self, state: SketchState) -> Tensor:
        sketch = state.sketch
        return sketch.tril() + sketch.tril(-1).T if len(self.slices) == 1 else sketch


class _Rows:
    """Iterates over the rows of Φ sqrt(d), as columns (P, c), drawing them anew every time."""

    def __init__(
        self, operator: LinearOperator, num_rows: int, chunk_size: int, seed: int, source: torch.device
    ) -> None:
        self.operator, self.num_rows, self.chunk_size = operator, num_rows, chunk_size
        self.seed, self.source = seed, source

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_rows, self.chunk_size):
            yield start, self.draw(start, min(self.chunk_size, self.num_rows - start))

    def draw(self, start: int, count: int) -> Tensor:
        """Return (P, count), from the seed of row `start`."""
        return self.operator.randn(count, torch.Generator(self.source).manual_seed(self.seed + start))


def _corrected(sketch: Tensor, num_tensors: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvalues, corrected for bias, descending, that bias, and their standard errors."""
    size = len(sketch) // num_tensors
    values, vectors = torch.linalg.eigh(sketch)
    traces = sketch.diagonal().reshape(num_tensors, size).sum(1)
    masses = (vectors**2).reshape(num_tensors, size, -1).sum(1)  # (L, rows), of each eigenvector in each tensor
    bias = (masses * traces[:, None]).sum(0) / size
    corrected = values - bias
    stderr = corrected.abs() * (2 * (masses**2).sum(0) / size).sqrt()
    return corrected.flip(0), bias.flip(0), stderr.flip(0)
