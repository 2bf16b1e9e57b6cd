"""Agreement of two similarities between documents, query by query."""

from __future__ import annotations

import torch
from scipy.stats import rankdata
from torch import Tensor


def per_query(left: Tensor, right: Tensor, *, top: int) -> dict[str, Tensor]:
    """Compare rows of two (D, D) similarities over the other documents.

    Returns:
        spearman, pearson: (D,) correlations; overlap: (D,) share of the `top` most similar that both have.
    """
    size = len(left)
    if left.shape != right.shape or left.shape != (size, size):
        raise ValueError(f"need two square matrices of one size, got {tuple(left.shape)} and {tuple(right.shape)}")
    if not 1 <= top < size:
        raise ValueError(f"top must be between 1 and {size - 1}, the number of other documents, got {top}")
    apart = ~torch.eye(size, dtype=torch.bool)
    one, two = left[apart].reshape(size, size - 1), right[apart].reshape(size, size - 1)
    ranks = [torch.from_numpy(rankdata(rows.numpy(), axis=1)) for rows in (one, two)]
    best = [rows.topk(top, dim=1).indices for rows in (one, two)]
    shared = (best[0][:, :, None] == best[1][:, None]).any(2).double().mean(1)
    return {"spearman": _correlation(*ranks), "pearson": _correlation(one, two), "overlap": shared}


def _correlation(one: Tensor, two: Tensor) -> Tensor:
    one, two = one - one.mean(1, keepdim=True), two - two.mean(1, keepdim=True)
    return (one * two).sum(1) / (one.norm(dim=1) * two.norm(dim=1))
