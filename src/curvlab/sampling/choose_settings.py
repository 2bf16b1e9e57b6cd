"""Step size and localization from a short pilot, with what was found on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from curvlab.linalg import LinearOperator
from curvlab.problem import Data, Loss
from curvlab.problem.batch import Batch
from curvlab.sampling.chains import run_chains
from curvlab.sampling.estimate_llc import check_nbeta, default_nbeta
from curvlab.sampling.sgld import SGLD
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from curvlab.training import EnsembleLosses

_MAX_ROUNDS = 8
_LANCZOS_STEPS = 8  # for each end of the spectrum
_EIGENVALUE_RTOL = 0.02
_TRACE_PROBES = 8
_NOISE_BATCHES = 8
_MEASURED_CHAINS = 4
# Of the loss that flat directions gain, exp(-3) = 5 % are missing after so many relaxation times 1/(ε γ).
_RELAXATION_TIMES = 3.0


@dataclass(frozen=True)
class SGLDSettings:
    """What to call `estimate_llc` with, and why.

    Attributes:
        step_size: ε.
        localization: γ.
        nbeta: that the two are for.
        bias: predicted bias of the estimate from the finite step size, as a share of it.
        pilot_llc: the highest estimate of a stable pilot, which `bias` is a share of; rough, as pilots are short.
        converged: the rounds ended at a step size that fulfils both limits.
        report: what was measured and decided, one sentence an entry.
    """

    step_size: float
    localization: float
    nbeta: float
    bias: float
    pilot_llc: float
    converged: bool
    report: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.report)


@dataclass(frozen=True)
class _Surface:
    top: float  # largest |eigenvalue| of the Hessian
    trace: float
    noise: float  # trace of the covariance of a batch's gradient


class _BatchHessian(LinearOperator):
    """The Hessian of one batch's loss at one position."""

    def __init__(
        self, losses: EnsembleLosses, position: Tensor, batch: Batch, weights: Tensor | None = None
    ) -> None:
        super().__init__(len(position), dtype=position.dtype, device=position.device)
        self._losses, self._position, self._batch, self._weights = losses, position, batch, weights

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return H V, column by column."""
        products = [
            self._losses.hessian_product(self._position, self._batch, v, weights=self._weights)
            for v in vectors.unbind(1)
        ]
        return torch.stack(products, dim=1)


def choose_sgld_settings(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    batch_size: int,
    num_burnin_steps: int,
    nbeta: float | None = None,
    localization: float | None = None,
    bias: float = 0.05,
    num_chains: int = 4,
    num_steps: int = 100,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
    generator: torch.Generator,
) -> SGLDSettings:
    """Choose step size and localization for `estimate_llc`.

    Expanding the stationary variances of SGLD in ε on a quadratic (see `SGLD`) gives the two limits

        ε <= 1 / (nbeta λmax + γ), a quarter of the stability limit, and
        ε nbeta [tr(H) + nbeta tr(C_B)] / 8 <= bias × estimate,

    the left side of which is what a finite step adds to the estimate; C_B is the covariance of a batch's
    gradient. Both are measured where the pilot's chains have gone, because at a singular point the Hessian at w0
    says nothing, and the step size is corrected until they agree. The localization is the weakest that the
    burn-in can follow: flat directions relax in 1/(ε γ) steps, so γ = 3/(ε num_burnin_steps).

    Args:
        model: as for `estimate_llc`.
        loss: likewise.
        data: likewise.
        batch_size: likewise.
        num_burnin_steps: of the estimate to come.
        nbeta: None: n / ln n.
        localization: None: chosen.
        bias: allowed share of the estimate.
        num_chains: of a pilot.
        num_steps: of a pilot; more where the report says that the estimate is still far off.
        weights: as for `estimate_llc`.
        chunk_size: as for `estimate_llc`; 1 for models that `vmap` does not take.
        generator: the only source of randomness.

    Cost: at most 8 pilots, with 96 Hessian products of a batch for each.
    """
    if num_burnin_steps < 1 or num_steps < 2 or num_chains < 1 or not 0 < bias < 1:
        raise ValueError(
            "need num_burnin_steps and num_chains of at least 1, num_steps of at least 2 and bias between 0 and "
            f"1, got {num_burnin_steps}, {num_chains}, {num_steps} and {bias}"
        )
    losses = EnsembleLosses(model, loss, data, example_weights=weights)
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    probe = torch.Generator(losses.start.device).manual_seed(_seed(generator))
    surface = _measure(losses, losses.start, batch_size, probe)
    step_size = 1 / (nbeta * surface.top) if surface.top > 0 else 1 / nbeta
    report = [f"at w0: λmax {surface.top:.3g}, tr(H) {surface.trace:.3g}; first step size {step_size:.2g}"]
    value, reference, predicted, strength, converged = math.nan, 0.0, math.nan, 0.0, False
    for attempt in range(1, _MAX_ROUNDS + 1):
        strength = _RELAXATION_TIMES / (step_size * num_burnin_steps) if localization is None else localization
        sampler = SGLD(losses, step_size=step_size, nbeta=nbeta, localization=strength, batch_size=batch_size)
        seeds = [_seed(generator) for _ in range(num_chains)]
        traces = run_chains(sampler, seeds, num_steps, chunk_size=chunk_size)
        excess = (traces.losses - traces.start_losses).double()[:, num_steps // 2 :]
        if not bool(torch.isfinite(excess).all() and torch.isfinite(traces.positions).all()):
            report.append(f"pilot {attempt}: diverged at step size {step_size:.2g}; a tenth of it next")
            step_size /= 10
            continue
        value = nbeta * float(excess.mean())
        ends = [_measure(losses, end, batch_size, probe) for end in traces.positions[:_MEASURED_CHAINS]]
        surface = _Surface(
            top=max(end.top for end in ends),
            trace=fmean(end.trace for end in ends),
            noise=fmean(end.noise for end in ends),
        )
        predicted = nbeta * (max(surface.trace, 0.0) + nbeta * surface.noise) * step_size / 8
        stable = 1 / (nbeta * surface.top + strength)
        # A small step takes a pilot less far, so its own estimate is too low to compare with: the highest counts.
        reference = max(reference, value) if predicted <= value / 2 else reference
        compared = reference if reference > 0 else max(value, 0.0)
        wanted = min(stable, step_size * bias * compared / predicted if predicted > 0 else math.inf)
        report.append(
            f"pilot {attempt}: step size {step_size:.2g}, localization {strength:.3g}: estimate {value:.3g}; "
            f"there λmax {surface.top:.3g}, tr(H) {surface.trace:.3g}, so the step size adds {predicted:.2g}; "
            f"it could be {wanted:.2g}"
        )
        converged = step_size / 2 <= wanted <= step_size * 2
        if converged:
            smaller = min(1.0, wanted / step_size)
            step_size, predicted = step_size * smaller, predicted * smaller
            strength = strength / smaller if localization is None else strength
            break
        step_size = min(max(wanted, step_size / 10), step_size * 10)
    value = reference if reference > 0 else value
    share = predicted / value if value > 0 else math.nan
    report.append(_conclusion(step_size, strength, share, converged, chosen=localization is None))
    return SGLDSettings(step_size, strength, nbeta, share, value, converged, tuple(report))


def _conclusion(step_size: float, strength: float, share: float, converged: bool, *, chosen: bool) -> str:
    if not converged:
        return (
            f"no step size found that fulfils both limits; {step_size:.2g} was the last. Pass a localization, "
            "or look whether w0 is a minimum at all."
        )
    how = (
        "the weakest that the burn-in can follow; more burn-in steps allow a weaker one" if chosen else "as asked"
    )
    return (
        f"chosen: step_size {step_size:.2g} (it adds about {100 * share:.0f} % to the estimate), "
        f"localization {strength:.3g} ({how})"
    )


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _measure(losses: EnsembleLosses, position: Tensor, batch_size: int, generator: torch.Generator) -> _Surface:
    """Return top eigenvalue and trace of the Hessian of one batch, and the noise of a batch's gradient."""
    full = batch_size >= losses.num_examples
    indices = None if full else losses.draw(_NOISE_BATCHES, batch_size, [generator])[0]
    batch = losses.batch(None) if indices is None else losses.batch(indices[0])

    weights = losses.weights_of(None if indices is None else indices[0], 1)
    hessian = _BatchHessian(losses, position, batch, None if weights is None else weights[0])
    trace = hutchinson_trace(hessian, num_matvecs=_TRACE_PROBES, generator=generator)
    # Lanczos finds the largest eigenvalue of either sign: at a saddle the smallest may decide.
    ends = [
        top_eigenvalues(signed, rtol=_EIGENVALUE_RTOL, max_matvecs=_LANCZOS_STEPS, generator=generator)
        for signed in (hessian, -hessian)
    ]
    top = max(0.0, *(float(end.values[0]) for end in ends))
    noise = 0.0
    if indices is not None:
        # One by one, since not every model goes through vmap.
        gradients = [
            losses.losses_and_gradients(
                position[None], losses.batch(own[None]), shared=False, weights=losses.weights_of(own[None], 1)
            )[1]
            for own in indices
        ]
        noise = sum(float(torch.cat(of_one).flatten(1).var(0).sum()) for of_one in zip(*gradients, strict=True))
    return _Surface(top, trace.value, noise)
