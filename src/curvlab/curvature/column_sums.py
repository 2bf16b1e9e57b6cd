"""The columns of a product while they grow batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ColumnSums:
    """Sums over batches of K columns of P numbers, each times `scale`.

    Attributes:
        rows: (K, P), the sums, one row for each column of the product; the first batch overwrites them.
        first: whether this is the first batch, so that nothing has been written yet.
        scale: 1/n, where n is known before all batches are read; else 1.
    """

    rows: Tensor
    first: bool
    scale: float

    def __getitem__(self, index: int) -> ColumnSums:
        """Return the sums of one column."""
        return self.block(slice(index, index + 1))

    def block(self, columns: slice) -> ColumnSums:
        """Return the sums of some columns."""
        return ColumnSums(self.rows[columns], self.first, self.scale)

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add a batch's columns, given parameter by parameter, each (K, *shape)."""
        start = 0
        for piece in pieces:
            stop = start + piece.shape[1:].numel()
            self.put(self.rows[:, start:stop], piece.detach().reshape(len(piece), stop - start))
            start = stop

    def add_zero(self) -> None:
        """Add a batch whose columns are zero."""
        if self.first:
            self.rows.zero_()

    def put(self, place: Tensor, values: Tensor) -> None:
        """Add values to a place in `rows`."""
        if self.first:
            torch.mul(values, self.scale, out=place)
        else:
            place.add_(values, alpha=self.scale)


def tangents_of(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut (K, P) into tensors (K, *shape), or (P,) into (*shape), that forward mode uses without copying them.

    PyTorch copies a tangent that does not begin at the start of its storage, unlike its parameter. So each piece
    becomes a tensor with its own storage, on the same memory.
    """
    sizes = [tensor.numel() for tensor in like]
    pieces = [
        piece.view((*rows.shape[:-1], *tensor.shape))
        for piece, tensor in zip(rows.split(sizes, dim=-1), like, strict=True)
    ]
    if rows.device.type not in ("cpu", "cuda"):
        return [piece.clone() for piece in pieces]
    return [torch.from_dlpack(piece) for piece in pieces]
