"""Output Hessians S_n as dense matrices: for losses that are known by products with them only."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.problem.losses import OutputLoss

# More outputs of an example than this are not held as (C, C) matrices.
MAX_OUTPUTS = 512
# Entries of matrices held at once.
_MATRIX_NUMBERS = 2**24


def dense_hessians(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return S_n, (N, C, C), C all outputs of an example. Cost: C products with S."""
    size = outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise ValueError(
            f"an example has {size} outputs: their Hessian is no matrix to hold ({MAX_OUTPUTS} at most)"
        )
    units = torch.eye(size).to(outputs).reshape(size, 1, *outputs.shape[1:]).expand(-1, *outputs.shape)
    return loss.hessian_product(outputs, targets, units).reshape(size, len(outputs), size).transpose(0, 1)


def hessian_factors(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return columns l_r = sqrt(μ_r) v_r of S = sum_r l_r l_rᵀ, the largest first, (C, *outputs.shape)."""
    values, vectors = torch.linalg.eigh(dense_hessians(loss, outputs, targets))
    if not _none_negative(values):
        raise ValueError(
            f"S is not positive semi-definite at these outputs (eigenvalue {float(values.min()):.3g}): it has no "
            "square root. The loss is not convex in the outputs."
        )
    columns = (vectors * values.clamp(min=0).sqrt()[:, None]).flip(-1)
    return columns.permute(2, 0, 1).reshape(-1, *outputs.shape)


def convex_at(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether no S_n has a negative eigenvalue beyond rounding at these outputs; False for a large C.

    Beyond rounding: below -100 ε of the largest in the batch, ε of the dtype.
    """
    size = outputs[0].numel()
    if size > MAX_OUTPUTS:
        return False
    rows = max(1, _MATRIX_NUMBERS // size**2)
    values = [
        torch.linalg.eigvalsh(dense_hessians(loss, h, y))
        for h, y in zip(outputs.split(rows), targets.split(rows), strict=True)
    ]
    return _none_negative(torch.cat(values))


def _none_negative(values: Tensor) -> bool:
    return float(values.min()) >= -100 * torch.finfo(values.dtype).eps * float(values.abs().max())
