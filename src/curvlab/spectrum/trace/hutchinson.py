"""Trace by random quadratic forms."""

from __future__ import annotations

from pathlib import Path

import torch

from curvlab.linalg import LinearOperator
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.probes import Distribution, checked_product, draw_probes


def hutchinson_trace(
    operator: LinearOperator,
    *,
    num_matvecs: int | None = None,
    rtol: float | None = None,
    max_matvecs: int = 10_000,
    chunk_size: int = 32,
    distribution: Distribution = "rademacher",
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate tr(A) as the mean of z_iᵀ A z_i (Hutchinson 1990); unbiased for any symmetric A.

    Signs (the default) have variance 2 (‖A‖²_F - sum_i A_ii²), normals 2 ‖A‖²_F: signs are never worse, and
    exact for a diagonal matrix. The paper on LiSSA uses normals of variance 1/P, which gives tr(A)/P.

    Args:
        operator: A, (P, P).
        num_matvecs: probes to use. With `rtol`, the fewest before the standard error is trusted (then 10).
        rtol: stop when stderr <= rtol |value|, looked at after each chunk. Not when the mean stops moving: a
            running mean moves less and less whether it is right or not.
        max_matvecs: with `rtol`, the most probes; the estimate then has the larger stderr that it reached.
        chunk_size: columns of each product.
        distribution: "rademacher" (signs) or "gaussian".
        checkpoint: file in which the forms so far and the generator's state are kept, saved after a chunk when a
            minute has passed: after a kill the same call goes on there and ends at the same numbers.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: one product for each probe; memory of `chunk_size` vectors.
    """
    if num_matvecs is None and rtol is None:
        raise ValueError("say how much work to do: num_matvecs=100, or rtol=0.01 (relative standard error)")
    if rtol is not None and rtol <= 0:
        raise ValueError(f"rtol must be positive, got {rtol}: it is stderr / |trace|, 0.01 for one per cent")
    fewest = num_matvecs if num_matvecs is not None else 10
    most = fewest if rtol is None else max_matvecs
    if not 1 <= fewest <= most or chunk_size < 1:
        raise ValueError(
            f"need 1 <= num_matvecs <= max_matvecs and chunk_size >= 1, got num_matvecs={fewest}, "
            f"max_matvecs={most}, chunk_size={chunk_size}"
        )
    samples = torch.empty(0, dtype=torch.float64)
    file = None
    if checkpoint is not None:
        if generator is None:
            raise ValueError("a checkpoint keeps the state of the probes' generator: pass generator=...")
        settings = {"trace": f"{distribution} {chunk_size} {fewest} {most}", "generator": generator.initial_seed()}
        file = operator.checkpoint(checkpoint, settings)
        if (kept := file.load()) is not None:
            samples = kept["samples"]
            generator.set_state(kept["generator"])
    while len(samples) < most:
        remaining = (fewest if len(samples) < fewest else most) - len(samples)
        num_probes = min(chunk_size, remaining)
        probes = draw_probes(operator, num_probes, distribution=distribution, generator=generator)
        forms = operator.inner(probes, checked_product(operator, probes))
        samples = torch.cat([samples, forms.double().cpu()])
        estimate = Estimate.from_samples(samples, len(samples))
        if rtol is not None and len(samples) >= fewest and estimate.stderr <= rtol * abs(estimate.value):
            break
        if file is not None and generator is not None and file.due(len(samples)):
            file.save({"samples": samples, "generator": generator.get_state()})
    return estimate
