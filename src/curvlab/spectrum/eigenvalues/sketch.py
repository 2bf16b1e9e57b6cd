"""Largest eigenvalues from a Gaussian sketch, as the paper on LiSSA estimates them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint
from curvlab.linalg import LinearOperator
from curvlab.shown import Shown, Summary, counted, first_values
from curvlab.spectrum.probes import checked_product
from curvlab.spectrum.vectors_at_once import vectors_that_fit

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
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
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
        checkpoint: file in which the finished columns of the sketch are kept, saved every minute: after a kill the
            same call goes on there and ends at the same numbers. Refused where there was room for chunks, and is
            no more, or the other way round: they are other random numbers.
        generator: draws the seed; required with `checkpoint`.

    Cost: d (or L d) products, and d/chunk_size times the drawing of Φ; memory of 6 chunk_size vectors. Row by row,
    the drawing of Φ d/(2 g) times (d L/g); memory of 2 g + 3 vectors, 5 at least.
    """
    sizes = list(tensor_sizes) if tensor_sizes is not None else [operator.shape[0]]
    if sum(sizes) != operator.shape[0] or min(sizes) < 1:
        raise ValueError(
            f"tensor_sizes must be positive and add up to {operator.shape[0]}, got a sum of {sum(sizes)}: "
            "[p.numel() for p in model.parameters() if p.requires_grad]"
        )
    num_rows = len(sizes) * sketch_size
    if not 1 <= k <= num_rows:
        raise ValueError(f"k must be between 1 and the sketch's {num_rows} rows, got {k}")
    if checkpoint is not None and generator is None:
        raise ValueError("a checkpoint belongs to the seed of the sketch: pass generator=...")
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else "cpu"))
    source = generator.device if generator is not None else torch.device("cpu")
    slices = operator.tensor_slices(sizes) if len(sizes) > 1 else [slice(0, operator.num_rows)]
    fitting, chunk = vectors_that_fit(operator, memory_budget), min(chunk_size, sketch_size)
    in_rows = chunk_size == 1 or fitting < _COPIES * chunk
    file = None
    if checkpoint is not None:
        name = f"{sizes} {sketch_size} {'row by row' if in_rows else chunk_size}"
        file = operator.checkpoint(checkpoint, {"sketch": name, "seed": seed})
    if in_rows:
        group = min(num_rows, max(1, (fitting - 3) // 2))
        rows = _Rows(operator, sketch_size, 1, seed, None)
        sketch = _row_by_row(operator, slices, sketch_size, group, rows, file=file)
    else:
        sketch = _chunk_by_chunk(
            operator, slices, sketch_size, _Rows(operator, sketch_size, chunk_size, seed, source), file
        )
    sketch = (sketch + sketch.T) / (2 * sketch_size)
    values, bias, stderr = _corrected(sketch, len(sizes))
    return SketchedEigenvalues(values[:k], bias[:k], stderr[:k], sketch, num_rows)


def _chunk_by_chunk(
    operator: LinearOperator, slices: list[slice], sketch_size: int, rows: _Rows, file: Checkpoint | None
) -> Tensor:
    """Return d Φ A Φᵀ."""
    sketch, done = _begun(file, len(slices) * sketch_size)
    num_columns = 0
    for at, chunk in rows:
        for tensor, part in enumerate(slices):
            num_columns += chunk.shape[1]
            if num_columns <= done:
                continue
            vectors = torch.zeros_like(chunk)
            vectors[part] = chunk[part]
            products = checked_product(operator, vectors)
            columns = slice(tensor * sketch_size + at, tensor * sketch_size + at + chunk.shape[1])
            for other_at, other in rows:
                for other_tensor, other_part in enumerate(slices):
                    start = other_tensor * sketch_size + other_at
                    overlap = operator.gram(other[other_part], products[other_part])
                    sketch[start : start + other.shape[1], columns] = overlap.double().cpu()
            if file is not None and file.due(num_columns):
                file.save({"sketch": sketch, "num_columns": num_columns})
    return sketch


def _begun(file: Checkpoint | None, num_rows: int) -> tuple[Tensor, int]:
    """Return the sketch so far, (num_rows, num_rows), and how many of its columns there are."""
    if file is not None and (kept := file.load()) is not None:
        return kept["sketch"], kept["num_columns"]
    return torch.zeros(num_rows, num_rows, dtype=torch.float64), 0


def _row_by_row(
    operator: LinearOperator,
    slices: list[slice],
    sketch_size: int,
    group: int,
    rows: _Rows,
    *,
    file: Checkpoint | None,
) -> Tensor:
    """Return d Φ A Φᵀ, with products of `group` rows held at a time."""
    num_rows, dense = len(slices) * sketch_size, len(slices) == 1
    sketch, done = _begun(file, num_rows)
    for start in range(done, num_rows, group):
        places = range(start, min(start + group, num_rows))
        # A vector a row, as a product takes them: it makes no copy.
        vectors = torch.zeros(len(places), operator.num_rows, dtype=operator.dtype, device=operator.device)
        for vector, place in zip(vectors, places, strict=True):
            part = slices[place // sketch_size] if not dense else slice(None)
            vector[part] = rows.draw(place % sketch_size, 1)[part, 0]
        products = checked_product(operator, vectors.T)
        del vectors, vector
        for at in range(start if dense else 0, sketch_size):  # the dense one is symmetric: half of the drawing
            other = rows.draw(at, 1)
            for tensor, part in enumerate(slices if not dense else [slice(None)]):
                overlap = operator.gram(other[part], products[part])
                sketch[tensor * sketch_size + at, start : places.stop] = overlap[0].double().cpu()
            del other
        del products
        if file is not None and file.due(places.stop):
            file.save({"sketch": sketch, "num_columns": places.stop})
    return sketch.tril() + sketch.tril(-1).T if dense else sketch


class _Rows:
    """Iterates over the rows of Φ sqrt(d), as columns (P, c), drawing them anew every time."""

    def __init__(
        self, operator: LinearOperator, num_rows: int, chunk_size: int, seed: int, source: torch.device | None
    ) -> None:
        self.operator, self.num_rows, self.chunk_size = operator, num_rows, chunk_size
        self.seed, self.source = seed, operator.device if source is None else source

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
