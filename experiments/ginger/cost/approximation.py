"""How near Ginger and QNG come to the moving averages that they stand for, over a stream of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from experiments.ginger.cost.matrices import (
    Shifted,
    cut,
    ginger_of,
    low_rank_part,
    moving_averages,
    product_of,
    qng_of,
    spectral_norm,
    update,
)
from experiments.ginger.cost.stream import Stream

ERRORS = ["inverse_error", "matrix_error", "direction_error"]


def approximation_errors(
    stream: Stream, *, decay: float, rank: int, dampings: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each optimizer and target: its errors, means over the checkpoints.

    Targets: `common`, α^τ I + G_t with G_t the moving average from 0, which Ginger with γ = α^τ has for its own,
    and whose identity is QNG's after τ updates; `own`, γI + G_t for Ginger (a row for each γ), α^t I + G_t, Eq. 7
    from G_0 = I, for QNG. `best` in place of an optimizer: G_t itself, cut to rank τ.

    Errors, relative: of the inverse, ‖target⁻¹ - found⁻¹‖₂ / ‖target⁻¹‖₂; of the matrix, ‖target - found‖₂ over
    ‖G_t‖₂; of the direction, that of the products with the batch's gradient of the loss.

    Args:
        stream: gradients; no checkpoint before τ.
        decay: α.
        rank: τ, of all three: equal memory.
        dampings: γ of Ginger's own target.
    """
    if min(stream.checkpoints) < rank:
        raise ValueError(
            f"QNG of rank {rank} has its identity after {rank} updates, but the first checkpoint is "
            f"{min(stream.checkpoints)}: raise stream.checkpoints, or lower ranks"
        )
    size, shift = len(stream.sampled[0]), decay**rank
    ginger, qng = ginger_of(size, rank=rank, decay=decay, damping=shift), qng_of(size, rank=rank, decay=decay)
    gradients = dict(zip(stream.checkpoints, stream.losses, strict=True))
    rows: list[dict[str, Any]] = []
    for step, (d, average) in enumerate(
        zip(stream.sampled, moving_averages(stream.sampled, decay), strict=True), 1
    ):
        update(ginger, d)
        update(qng, d)
        if step not in gradients:
            continue
        of_ginger, of_qng = low_rank_part(ginger), product_of(qng, step)
        cases = [
            ("Ginger", "common", shift, Shifted(shift, of_ginger)),
            ("QNG", "common", shift, of_qng),
            ("best", "common", shift, Shifted(shift, cut(average, rank))),
            ("QNG", "own", decay**step, of_qng),
            *(("Ginger", "own", damping, Shifted(damping, of_ginger)) for damping in dampings),
        ]
        for optimizer, of, target_shift, found in cases:
            row: dict[str, Any] = {"optimizer": optimizer, "target": of}
            row["damping"] = "α^t" if (optimizer, of) == ("QNG", "own") else f"{target_shift:g}"
            rows.append(row | _errors(Shifted(target_shift, average), found, gradients[step]))
    means = pd.DataFrame(rows).groupby(["optimizer", "target", "damping"], sort=False)[ERRORS].mean()
    return means.reset_index().to_dict("records")  # type: ignore[return-value]  # names are strings


def _errors(target: Shifted, found: Shifted, gradient: Tensor) -> dict[str, float]:
    exact, own = target.inverse, found.inverse
    identity = torch.eye(len(exact), dtype=exact.dtype)
    difference = target.matrix - found.matrix + (target.shift - found.shift) * identity
    # Outside of the span, where there are more parameters than gradients, both are multiples of the identity.
    outside = abs(1 / target.shift - 1 / found.shift)
    return {
        "inverse_error": max(spectral_norm(exact - own), outside) * target.shift,
        "matrix_error": spectral_norm(difference) / spectral_norm(target.matrix),
        "direction_error": float(((exact - own) @ gradient).norm() / (exact @ gradient).norm()),
    }
