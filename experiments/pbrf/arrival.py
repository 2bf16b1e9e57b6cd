"""Whether a network can decide a claim on influence and retraining: one rule for all tables and figures."""

from __future__ import annotations

import math
from dataclasses import replace

from curvlab.lab import ClaimResult
from curvlab.lab.reporting.claims import REPRODUCED

# Above it the influence estimate is not the solution that it is named after. With the Hessian's eigenvalues on
# both sides of zero a small residual bounds no error: only a solve to rounding is one.
LARGEST_RESIDUAL = {"gauss_newton": 0.1, "hessian": 1e-6}
MOVED = 0.5  # of the estimate's way, below which a descent has hardly begun


def arrived(
    *,
    curvature: str = "gauss_newton",
    residual: float = 0.0,
    is_exact: bool = True,
    learned: bool = True,
    moved: float = math.nan,
    moved_by_linearised: float = math.nan,
) -> str:
    """Return why a network decides nothing about an estimate; nothing where it does. What is nan is not asked.

    Three things are needed. The network has learned something: its training loss is below that of the best
    constant outputs. The estimate is what it is called: an exact one solved to `LARGEST_RESIDUAL`, LiSSA finite at
    the paper's depth, whatever its residual. And the retraining has got somewhere: its linearisation, which tends
    to the exact estimate, has moved the outputs by at least half of what that does; where it has hardly begun,
    anything is linear, and nothing predicts it for a reason.
    """
    if not learned:
        return "θ^s has learned nothing: constant outputs have a training loss as low."
    if not is_exact and not math.isfinite(residual):
        return "LiSSA is not finite at the paper's depth."
    if is_exact and not residual <= LARGEST_RESIDUAL[curvature]:
        needed = f"needed: {LARGEST_RESIDUAL[curvature]:g}"
        return f"The influence estimate is not solved: a residual of {residual:.2g}, {needed}."
    if moved_by_linearised < MOVED * moved:
        share = moved_by_linearised / moved
        return (
            f"The retraining has hardly begun: linearised, it has moved the outputs by {share:.2g} of what the "
            f"influence estimate does, needed: {MOVED:g}."
        )
    return ""


def explained(result: ClaimResult, why: str) -> ClaimResult:
    """Return the result with its explanation also where it is reproduced."""
    return replace(result, explanation=why) if result.verdict == REPRODUCED else result
