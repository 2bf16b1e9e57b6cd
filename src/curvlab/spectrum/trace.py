"""The trace as a mean of random quadratic forms: Hutchinson, and forms that need no backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import positive, whole
from curvlab.curvature.examples import quadratic_forms
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, checked_product, draw_probes, generator_for
from curvlab.linalg.vectors import Distribution
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """A number, its standard error and its price.

    Attributes:
        value: the estimate, e.g. of tr(A).
        stderr: standard error over independent probes; nan when there is only one.
        num_matvecs: products paid for, counted per vector.
    """

    value: float
    stderr: float
    num_matvecs: int

    def summary(self) -> Summary:
        """Return value, standard error and cost."""
        one = math.isnan(self.stderr)
        error = "no error: a single probe" if one else "standard error over independent probes"
        value = f"{self.value:.5g}" if one else f"{self.value:.5g} ± {self.stderr:.2g}"
        return Summary("estimate", value, error, (counted(self.num_matvecs, "product"),))

    @classmethod
    def from_samples(cls, samples: Tensor, num_matvecs: int) -> Estimate:
        """Return the mean of independent (n,) samples, stderr = sd / sqrt(n), summed in fp64."""
        samples = samples.double()
        stderr = float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
        return cls(value=float(samples.mean()), stderr=stderr, num_matvecs=num_matvecs)


# -------------------------------------------------------------------------- means of independent forms
@dataclass(frozen=True)
class FormsState:
    """Independent numbers so far.

    Attributes:
        samples: (n,), fp64 on the CPU.
        generator: what draws the probes.
        num_steps: chunks of them.
    """

    samples: Tensor
    generator: torch.Generator | None
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class Forms:
    """A method for `iterate`: quadratic forms of random probes, chunk by chunk; its result are their samples.

    Attributes:
        operator: A.
        forms: of (P, k) probes, (k,).
        most: probes at the most.
        chunk_size: probes at a time.
        distribution: of the probes.
        generator: what draws them.
        settings: all else that `forms` depends on.
        fewest: probes before `needed` is asked.
        needed: how many samples will be enough, by those so far.
    """

    operator: LinearOperator
    forms: Callable[[Tensor], Tensor]
    most: int
    chunk_size: int
    distribution: Distribution
    generator: torch.Generator | None
    settings: Any = None
    fewest: int = 0
    needed: Callable[[Tensor], float] = field(default=lambda samples: math.inf)

    def depends_on(self) -> Mapping[str, Any]:
        """Return the operator, the generator and the settings."""
        settings = (self.fewest, self.most, self.chunk_size, self.distribution, self.settings)
        return {"operator": self.operator, "generator": self.generator, "settings": settings}

    def init(self) -> FormsState:
        """Return no samples."""
        return FormsState(torch.empty(0, dtype=torch.float64), self.generator)

    def step(self, state: FormsState) -> FormsState:
        """Add the forms of one more chunk."""
        known = len(state.samples)
        left = (self.fewest if known < self.fewest else self.most) - known
        width = min(self.chunk_size, left)
        probes = draw_probes(self.operator, width, distribution=self.distribution, generator=state.generator)
        samples = torch.cat([state.samples, self.forms(probes).double().cpu()])
        done = len(samples) >= self.most or (len(samples) >= self.fewest and self.needed(samples) <= len(samples))
        return FormsState(samples, state.generator, state.num_steps + 1, done)

    def expected_steps(self, state: FormsState) -> float:
        """Return how many chunks there will be."""
        needed = self.needed(state.samples)
        num_samples = min(self.most, max(self.fewest, needed if math.isfinite(needed) else self.most))
        return state.num_steps + max(0.0, num_samples - len(state.samples)) / self.chunk_size

    def result(self, state: FormsState) -> Tensor:
        """Return the samples."""
        return state.samples


def hutchinson_trace(
    operator: LinearOperator,
    *,
    num_matvecs: int | None = None,
    rtol: float | None = None,
    max_matvecs: int = 10_000,
    chunk_size: int = 32,
    distribution: Distribution = "rademacher",
    progress: bool = True,
    callback: Callable[[FormsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
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
        progress: show a bar.
        callback: called with the state after each step, a chunk.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: one product for each probe; memory of `chunk_size` vectors.

    >>> from curvlab.linalg import DenseOperator
    >>> hutchinson_trace(DenseOperator(torch.diag(torch.arange(5.0))), num_matvecs=3)
    estimate 10 ± 0 (standard error over independent probes)
      3 products
    """
    generator = generator_for(operator, generator)
    if num_matvecs is None and rtol is None:
        raise ValueError("say how much work to do: num_matvecs=100, or rtol=0.01 (relative standard error)")
    if rtol is not None:
        positive("rtol", rtol, "it is stderr / |trace|, 0.01 for one per cent")
    whole("max_matvecs", max_matvecs), whole("chunk_size", chunk_size)
    fewest = 10 if num_matvecs is None else whole("num_matvecs", num_matvecs)
    most = fewest if rtol is None else max_matvecs
    if fewest > most:
        raise ValueError(f"need num_matvecs <= max_matvecs, got num_matvecs={fewest}, max_matvecs={most}")

    def forms(probes: Tensor) -> Tensor:
        return operator.inner(probes, checked_product(operator, probes))

    def needed(samples: Tensor) -> float:
        estimate = Estimate.from_samples(samples, len(samples))
        if rtol is None or estimate.value == 0:
            return math.inf if estimate.stderr else 0.0
        return len(samples) * (estimate.stderr / (rtol * abs(estimate.value))) ** 2

    work = Forms(operator, forms, most, chunk_size, distribution, generator, rtol, fewest, needed)
    samples = iterate(work, name="trace", progress=progress, callback=callback, checkpoint=checkpoint)
    return Estimate.from_samples(samples, len(samples))


def mean_eigenvalue(
    operator: LinearOperator,
    *,
    num_probes: int,
    batch_size: int | None = None,
    chunk_size: int = 32,
    distribution: Distribution = "rademacher",
    progress: bool = True,
    callback: Callable[[FormsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
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
        progress: show a bar.
        callback: called with the state after each step, a chunk.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: a quadratic form takes half the time of the product that `hutchinson_trace` needs, and no memory for a
    backward pass; `num_matvecs` counts quadratic forms, whether of a batch or of all data.
    """
    generator = generator_for(operator, generator)
    whole("num_probes", num_probes)
    whole("chunk_size", chunk_size)

    def forms(probes: Tensor) -> Tensor:
        sampled = operator if batch_size is None else operator.sample(batch_size, generator)
        return quadratic_forms(sampled, probes) / operator.shape[0]

    width = chunk_size if batch_size is None else 1
    work = Forms(operator, forms, num_probes, width, distribution, generator, batch_size)
    samples = iterate(work, name="mean eigenvalue", progress=progress, callback=callback, checkpoint=checkpoint)
    return Estimate.from_samples(samples, num_probes)
