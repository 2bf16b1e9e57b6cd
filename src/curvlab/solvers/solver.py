"""The interface of a solver, and the input checks that all of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint, fingerprint
from curvlab.linalg import LinearOperator
from curvlab.solvers.solution import Solution
from curvlab.spectrum.probes import describe


class Solver(Protocol):
    """Anything that approximates x = A⁻¹ b. Damping belongs to A: pass `op + damping * identity`."""

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Solve for b, (P,) or (P, K). Deterministic solvers accept the generator and ignore it."""
        ...


class IndefiniteOperatorError(ValueError):
    """The operator is not, or not known to be, positive definite."""

    def __init__(self, operator: LinearOperator, reason: str) -> None:
        super().__init__(
            f"{describe(operator)} {reason}. Use GaussNewtonOperator, or add damping larger than |lambda_min|: "
            "op + damping * identity (curvlab.spectrum.top_eigenvalues(-op) measures -lambda_min)."
        )


def open_checkpoint(
    path: str | Path | None, operator: LinearOperator, b: Tensor, solver: str, *, every: int | None
) -> Checkpoint | None:
    """Return the file of one solver's work on A X = B, (P, K); None without a path."""
    if path is None:
        return None
    settings = {"solver": solver, "right-hand sides": lambda: fingerprint([b])}
    return operator.checkpoint(path, settings, every=every)


def check_stopping(rtol: float, max_steps: int | None) -> None:
    """Refuse a relative residual or a number of steps that no iteration could end at."""
    if not 0 < rtol < 1:
        raise ValueError(f"rtol must be between 0 and 1, got {rtol}: it is ‖b - A x‖ / ‖b‖")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")


def check_right_hand_side(operator: LinearOperator, b: Tensor) -> Tensor:
    """Return b as (P, K), or raise a ValueError for a wrong length, dtype or device, or for NaN and inf."""
    operator.check_vectors(b)
    check_finite(b, "the right-hand side")
    return b[:, None] if b.ndim == 1 else b


def check_definite(operator: LinearOperator) -> None:
    """Refuse an operator that is not known to be PSD and carries no damping."""
    if not operator.is_psd and operator.damping <= 0:
        raise IndefiniteOperatorError(
            operator, f"is not known to be positive semi-definite and has damping {operator.damping:g}"
        )


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise a ValueError when a tensor has NaN or inf in it."""
    if not bool(torch.isfinite(tensor).all()):
        columns = (~torch.isfinite(tensor.reshape(tensor.shape[0], -1)).all(0)).nonzero()[:, 0].tolist()
        raise ValueError(
            f"{name} is not finite (NaN or inf in column {', '.join(map(str, columns[:5]))}): check the model's "
            "parameters, outputs and gradients, or use float64."
        )
