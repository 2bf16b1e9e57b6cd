"""The matrices of Ginger and QNG in a stream's coordinates, dense, and how near they come to their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from curvlab.optim import QNG, Ginger
from experiments.ginger.cost.stream import Stream


@dataclass(frozen=True)
class Shifted:
    """shift I + M, M symmetric, (n, n): a curvature matrix as both methods have it.

    Attributes:
        shift: of the identity; M says nothing outside of the stream's span, and this is all there is.
        matrix: M.
    """

    shift: float
    matrix: Tensor

    @property
    def inverse(self) -> Tensor:
        """(shift I + M)⁻¹, from the eigenvalues of M, which may be far smaller than the shift or far larger."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return (vectors / (self.shift + values)) @ vectors.T


def ginger_of(size: int, *, rank: int, decay: float, damping: float) -> Ginger:
    """Return Ginger of one vector of `size` numbers in double precision."""
    return Ginger([_vector(size)], 1.0, rank=rank, decay=decay, damping=damping)


def qng_of(size: int, *, rank: int, decay: float) -> QNG:
    """Return QNG of one vector of `size` numbers in double precision."""
    return QNG([_vector(size)], 1.0, rank=rank, decay=decay)


def _vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=torch.float64))


def update(optimizer: Ginger | QNG, d: Tensor) -> None:
    """Bring a gradient of sampled labels, (n,), into an optimizer of one vector."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = d.to(parameter.dtype, copy=True)
    optimizer.update_curvature()


def low_rank_part(ginger: Ginger) -> Tensor:
    """Return U diag(σ) Uᵀ, (n, n), which does not depend on the damping."""
    ((values, vectors),) = ginger.eigendecompositions()
    return (vectors * values) @ vectors.T


def inverse_of(optimizer: Ginger | QNG) -> Tensor:
    """Return what the optimizer multiplies gradients by, (n, n): a product for each column."""
    (parameter,) = optimizer.param_groups[0]["params"]
    identity = torch.eye(len(parameter), dtype=torch.float64)
    return torch.stack([optimizer.inverse_product(column) for column in identity], 1)


def product_of(qng: QNG, num_updates: int) -> Shifted:
    """Return A Aᵀ of QNG after so many updates, as α^min(τ, t) I + M."""
    settings = qng.param_groups[0]
    shift = settings["decay"] ** min(settings["rank"], num_updates)
    matrix = torch.linalg.inv(inverse_of(qng))
    return Shifted(shift, matrix - shift * torch.eye(len(matrix), dtype=matrix.dtype))


def moving_averages(vectors: Iterable[Tensor], decay: float) -> Iterator[Tensor]:
    """Yield G_1, G_2, ..., (n, n): Eq. 7 from G_0 = 0."""
    average: Tensor | float = 0.0
    for d in vectors:
        average = decay * average + (1 - decay) * torch.outer(d, d)
        yield average


def cut(matrix: Tensor, rank: int) -> Tensor:
    """Return the best approximation of a positive semi-definite matrix of this rank."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖M‖₂ of a symmetric matrix."""
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2).abs().max())


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
