"""Spectra of curvature matrices on which Lemma 1 and Theorem 1 are tried."""

from __future__ import annotations

import torch
from torch import Tensor


def spectrum(name: str, size: int) -> Tensor:
    """Return (size,) eigenvalues, the largest of which is 1, in float64.

    flat; power, 1/k; root, 1/sqrt(k); exponential, from 1 to 1e-3; spike, one of 1 and the rest together 20.
    """
    k = torch.arange(1, size + 1, dtype=torch.float64)
    found = {
        "flat": torch.ones_like(k),
        "power": 1 / k,
        "root": k**-0.5,
        "exponential": 10 ** (-3 * (k - 1) / max(size - 1, 1)),
        "spike": torch.where(k == 1, 1.0, 20 / max(size - 1, 1)).double(),
    }
    if name not in found:
        raise ValueError(f"unknown spectrum {name!r}: choose {', '.join(found)}")
    if float(found[name].max()) > 1:
        raise ValueError(f"spectrum {name!r} needs more than {size} eigenvalues: at least 21")
    return found[name]
