"""Between lists of tensors and the flat vectors that operators act on (row-major, in the given order)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


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
