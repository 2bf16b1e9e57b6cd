"""Trace with the large eigenvalues taken out first."""

from __future__ import annotations

from pathlib import Path

import torch

from curvlab.linalg import LinearOperator
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.orthonormal import orthonormalise
from curvlab.spectrum.probes import draw_probes
from curvlab.spectrum.resumed_products import ResumedProducts


def hutchpp_trace(
    operator: LinearOperator,
    *,
    num_matvecs: int,
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate tr(A) by Hutch++ (Meyer, Musco, Musco & Woodruff 2021, Algorithm 1); unbiased.

    tr(A) = tr(QᵀAQ) + tr((I - QQᵀ) A (I - QQᵀ)) with Q an orthonormal basis of A S for random signs S. The
    first part is exact, the second Hutchinson's estimate, whose variance no longer knows the eigenvalues that
    Q took out. The standard error is that of the second part, given Q. Worth it where few eigenvalues carry
    the trace; on a flat spectrum plain Hutchinson uses its products better.

    Args:
        operator: A, (P, P).
        num_matvecs: a third each for A S, A Q and the probes of the rest; at least 6.
        checkpoint: file in which all products so far are kept, saved every minute: after a kill the same call goes
            on there and ends at the same numbers.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: num_matvecs products; memory of num_matvecs vectors.
    """
    if num_matvecs < 6:
        raise ValueError(f"num_matvecs must be at least 6, two for each of three parts, got {num_matvecs}")
    products = ResumedProducts(operator, f"hutch++ {num_matvecs}", checkpoint=checkpoint, generator=generator)
    width = min(num_matvecs // 3, operator.shape[0])
    sketch = products.of(draw_probes(operator, width, generator=generator))
    basis, _ = orthonormalise(operator, sketch)
    images = products.of(basis)
    exact = float(operator.inner(basis, images).double().sum())
    num_probes = num_matvecs - width - basis.shape[1]
    probes = draw_probes(operator, num_probes, generator=generator)
    probes = probes - basis @ operator.gram(basis, probes)
    forms = operator.inner(probes, products.of(probes))
    rest = Estimate.from_samples(forms, num_probes)
    return Estimate(exact + rest.value, rest.stderr, width + basis.shape[1] + num_probes)
