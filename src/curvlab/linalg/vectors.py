"""Flat vectors: parameters as vectors and back, random probes, checked products, orthonormal bases.

Tensors are flattened row-major, in the given order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from curvlab.linalg.operator import LinearOperator, SumOperator

Distribution = Literal["rademacher", "gaussian"]

_SAFE_CONDITION = 100.0  # of a block: its square times rounding is what the first pass leaves to the second
_BLOCK = 32  # columns between which Gram-Schmidt goes one by one; against all others it is a matrix product


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors into one (P,) vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def flatten_columns(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors with a leading axis K into (P, K): column k holds the k-th entries."""
    # Sizes are spelled out because -1 cannot be inferred when K = 0.
    return torch.cat([tensor.reshape(len(tensor), tensor.shape[1:].numel()) for tensor in tensors], dim=1).T


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a (P,) vector into views with the shapes of `like`."""
    pieces = vector.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def unflatten_columns(vectors: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split (P, K) into tensors of shape (K, *shape): the batched layout that `torch.func.vmap` maps over."""
    pieces = vectors.T.split([tensor.numel() for tensor in like], dim=1)
    return [piece.reshape(vectors.shape[1], *tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def draw_probes(
    operator: LinearOperator,
    num_probes: int,
    *,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return (P, num_probes) with independent entries of mean 0 and variance 1: signs, or normals."""
    if distribution not in ("rademacher", "gaussian"):
        raise ValueError(f"distribution must be 'rademacher' or 'gaussian', got {distribution!r}")
    normals = operator.randn(num_probes, generator)  # the operator's own, so that sharded vectors agree
    return torch.where(normals < 0, -1.0, 1.0).to(normals) if distribution == "rademacher" else normals


def checked_product(operator: LinearOperator, vectors: Tensor) -> Tensor:
    """Return A V, or raise a ValueError when it is not finite."""
    products = operator @ vectors
    if not bool(torch.isfinite(products).all()):
        raise ValueError(
            f"the product with {describe(operator)} is not finite (NaN or inf): check the model's "
            "parameters and outputs for NaN, or use float64."
        )
    return products


def describe(operator: LinearOperator) -> str:
    """Return the type's name; for a sum those of its terms."""
    if isinstance(operator, SumOperator):
        return " + ".join(type(term).__name__ for term in operator.terms)
    return type(operator).__name__


def orthonormalise(
    operator: LinearOperator,
    candidates: Tensor,
    *,
    against: Tensor | None = None,
    scale: float | None = None,
    fill: bool = False,
    apart: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (Q, R) with candidates = against (...) + Q R, Q orthonormal and orthogonal to `against`.

    Blockwise Gram-Schmidt, each pass done twice ("twice is enough", Kahan): orthonormal to rounding also for
    columns that nearly depend on one another, which a factor of the Gram matrix would not be. Where they do not,
    that factor is taken within a block, as fewer and larger products are faster (CholeskyQR2, Fukaya et al. 2014).

    Args:
        operator: owns the inner products.
        candidates: (P, w).
        against: (P, m), orthonormal.
        scale: a column counts as vanished when what is new in it is at most rounding against this; by default
            the largest norm of a candidate.
        fill: put random directions, with a zero row in R, in the place of vanished columns, as far as there is
            room; otherwise drop them.
        apart: never copy `against`, for one that fills the memory: of at most 32 candidates.
        generator: draws those directions.

    Returns:
        Q (P, r) with r <= w, in the operator's dtype, and R (r, w), fp64 on the CPU.
    """
    if scale is None:
        scale = float(operator.norm(candidates).max())
    tolerance = min(100 * torch.finfo(operator.dtype).eps, 0.01) * scale
    basis = candidates[:, :0] if against is None else against
    num_fixed, width = basis.shape[1], candidates.shape[1]
    rows: list[Tensor] = []
    for start in range(0, width, _BLOCK):
        block = candidates[:, start : start + _BLOCK]
        coefficients = torch.zeros(basis.shape[1], block.shape[1], dtype=torch.float64)
        factor = torch.eye(block.shape[1], dtype=torch.float64)
        for threshold in (tolerance, 0.0):
            inside, block, inner_factor = _one_pass(
                operator, block, basis, tolerance=threshold, fill=fill, generator=generator
            )
            coefficients += inside @ factor
            factor = inner_factor @ factor
        rows.append(torch.cat([coefficients[num_fixed:], factor]))
        if apart and width <= _BLOCK:
            return block, rows[0]
        basis = torch.cat([basis, block], dim=1)
    triangular = torch.zeros(basis.shape[1] - num_fixed, width, dtype=torch.float64)
    for index, block_rows in enumerate(rows):
        start = index * _BLOCK
        triangular[: len(block_rows), start : start + block_rows.shape[1]] = block_rows
    return basis[:, num_fixed:], triangular


def _one_pass(
    operator: LinearOperator,
    block: Tensor,
    basis: Tensor,
    *,
    tolerance: float,
    fill: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (C, V, R) with block = basis C + V R."""
    inside = operator.gram(basis, block)
    block = block - basis @ inside
    if 0 < block.shape[1] <= operator.shape[0] - basis.shape[1]:
        gram = operator.gram(block, block).double().cpu()
        squares = torch.linalg.eigvalsh((gram + gram.T) / 2)
        if float(squares[0]) > max(tolerance**2, float(squares[-1]) / _SAFE_CONDITION**2):
            triangular = torch.linalg.cholesky(gram, upper=True)
            eye = torch.eye(len(gram), dtype=gram.dtype)
            inverse = torch.linalg.solve_triangular(triangular, eye, upper=True)
            return inside.double().cpu(), block @ inverse.to(block), triangular
    new = block[:, :0]
    factor = torch.zeros(block.shape[1], block.shape[1], dtype=torch.float64)
    for column in range(block.shape[1]):
        vector, position = block[:, column : column + 1], new.shape[1]
        for _ in range(2):
            overlap = operator.gram(new, vector)
            vector = vector - new @ overlap
            factor[:position, column] += overlap[:, 0].double().cpu()
        norm = operator.norm(vector)
        vanished = float(norm) <= tolerance
        full = basis.shape[1] + position == operator.shape[0]
        if full or (vanished and not fill):
            continue
        if vanished:
            vector = operator.randn(1, generator)
            for known in (basis, new, basis, new):
                vector = vector - known @ operator.gram(known, vector)
            norm = operator.norm(vector)
        else:
            factor[position, column] = float(norm)
        new = torch.cat([new, vector / norm], dim=1)
    return inside.double().cpu(), new, factor[: new.shape[1]]


def bordered(projected: Tensor, coupling: Tensor, corner: Tensor) -> Tensor:
    """Return T = QᵀAQ once a block has joined Q, (m, m) -> (m + w, m + w), fp64 on the CPU.

    Args:
        projected: T before.
        coupling: B, (w, v), which couples the block to the last v columns before it alone.
        corner: the block's own part, (w, w), whose symmetric half is taken.
    """
    old, before, corner = len(projected), coupling.shape[1], corner.double().cpu()
    grown = torch.zeros(old + len(corner), old + len(corner), dtype=torch.float64)
    grown[:old, :old] = projected
    grown[old:, old:] = (corner + corner.T) / 2
    grown[old:, old - before : old] = coupling
    grown[old - before : old, old:] = coupling.T
    return grown
