"""Trace by quadratic forms that need no backward pass."""

from __future__ import annotations

from pathlib import Path

import torch

from curvlab.curvature.quadratic_forms import quadratic_forms
from curvlab.linalg import LinearOperator
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.probes import Distribution, draw_probes
from curvlab.spectrum.resumed_forms import ResumedForms


def mean_eigenvalue(
    operator: LinearOperator,
    *,
    num_probes: int,
    batch_size: int | None = None,
    chunk_size: int = 32,
    distribution: Distribution = "rademacher",
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate tr(G)/P, the mean eigenvalue, by forward passes alone (Klochkov & Liu 2024, App. C); unbiased.

    The mean of g_iᵀ G_i g_i = 1/n sum_n (J_n g_i)ᵀ S_n (J_n g_i), g_i of variance 1/P. G_i = G by default; with
    `batch_size` an independent batch for each probe, as in the paper (1,600 of them), so that the standard error
    covers probes and sampling alike.

    Args:
        operator: G, a GaussNewtonOperator or one that is spread over processes; without damping.
        num_probes: quadratic forms; at least 30 for a standard error that can be trusted.
        batch_size: examples of each batch; None for all data.
        chunk_size: probes at a time, without `batch_size`.
        distribution: "rademacher" (signs), or "gaussian" as in the paper, whose variance is never smaller.
        checkpoint: file in which the forms so far and the generator's state are kept, saved after a chunk when a
            minute has passed: after a kill the same call goes on there and ends at the same numbers.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: a quadratic form takes half the time of the product that `hutchinson_trace` needs, and no memory for a
    backward pass; `num_matvecs` counts quadratic forms, whether of a batch or of all data.
    """
    if num_probes < 1 or chunk_size < 1:
        raise ValueError(f"need num_probes >= 1 and chunk_size >= 1, got {num_probes} and {chunk_size}")
    width = chunk_size if batch_size is None else 1
    name = f"mean eigenvalue {num_probes} {width} {batch_size} {distribution}"
    forms = ResumedForms(operator, name, checkpoint=checkpoint, generator=generator)
    for start in range(forms.count, num_probes, width):
        probes = draw_probes(
            operator, min(width, num_probes - start), distribution=distribution, generator=generator
        )
        sampled = operator if batch_size is None else operator.sample(batch_size, generator)
        forms.add(quadratic_forms(sampled, probes) / operator.shape[0])
    return Estimate.from_samples(forms.all(), num_probes)
