"""LiSSA's three hyperparameters from two numbers of the spectrum."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LissaHyperparameters:
    """Settings of `Lissa`; pass them on as Lissa(**dataclasses.asdict(settings))."""

    step_size: float
    batch_size: int
    num_steps: int


def lissa_hyperparameters(
    *,
    trace: float,
    largest_eigenvalue: float,
    damping: float,
    constant: float = 2.0,
    num_time_constants: float = 2.0,
) -> LissaHyperparameters:
    """Return the recommendation of Klochkov & Liu (2024), Corollary 1 and the footnote of Table 1.

    step_size = 1 / (λmax + damping), |B| = C tr / λmax, T = 2 / (step_size damping), both rounded up.

    Table 1 prints step_size and T to one or two digits, so its T is up to 1.6 times this one; its |B| = 5 for
    ResNet-50 is not what the formula gives for its trace and λmax (87).

    Args:
        trace: tr(G) without damping (not tr(G)/P, which Table 1 lists).
        largest_eigenvalue: λmax of G without damping.
        damping: added to G before inversion.
        constant: C of condition C.1. The paper assumes 2; measured on overfitted networks it is 7 and more,
            and with a C that is too small LiSSA diverges.
        num_time_constants: T in units of 1 / (step_size damping); the slowest error shrinks by exp(-this).
    """
    positive = {
        "trace": trace,
        "largest_eigenvalue": largest_eigenvalue,
        "damping": damping,
        "constant": constant,
        "num_time_constants": num_time_constants,
    }
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if trace < 0.99 * largest_eigenvalue:  # both are estimates
        raise ValueError(
            f"trace {trace:g} is below largest_eigenvalue {largest_eigenvalue:g}, impossible for a positive "
            "semi-definite matrix: pass tr(G), not tr(G)/P, and both for the same parameters."
        )
    return LissaHyperparameters(
        step_size=1 / (largest_eigenvalue + damping),
        batch_size=math.ceil(constant * trace / largest_eigenvalue),
        num_steps=math.ceil(num_time_constants * (largest_eigenvalue + damping) / damping),
    )
