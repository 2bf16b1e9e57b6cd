"""Step size, friction and localization from short pilots, with what was found on the way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlab.arguments import not_negative, real, whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.sampling.chains import run_chains
from curvlab.sampling.diagnostics import NUM_ERRORS_FROM_ZERO, standard_error
from curvlab.sampling.ends import LANCZOS_STEPS, BatchHessian
from curvlab.sampling.settings import SGLDSettings
from curvlab.sampling.sgld import check_nbeta, default_nbeta
from curvlab.sampling.underdamped import langevin_sampler
from curvlab.seeding import generator_of
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from curvlab.training import EnsembleLosses

Sampler = Literal["sgld", "averaged", "underdamped"]

_MAX_ROUNDS = 8
_EIGENVALUE_RTOL = 0.02
_TRACE_PROBES = 8
_NOISE_BATCHES = 8
_MEASURED_CHAINS = 4
# ε (nbeta λmax + γ)/4 of the chosen step. `problems` has 0.25: pilots are short, and λmax grows on the way.
_STABILITY = 0.1
# Of the loss that flat directions gain, exp(-3) = 5 % are missing after so many relaxation times 1/(ε γ).
_RELAXATION_TIMES = 3.0
_LARGEST_CHANGE = 10.0  # of the step size from pilot to pilot
_MAX_REACH = 1e4


class SettingsWarning(UserWarning):
    """`choose_sgld_settings` found no settings that an estimate could be trusted at."""


@dataclass(frozen=True)
class _Surface:
    top: float  # largest |eigenvalue| of the Hessian
    trace: float
    noise: float  # trace of the covariance of a batch's gradient


@dataclass(frozen=True)
class _Step:
    """Step size ε, and the reach, `UnderdampedLangevin.reach`."""

    size: float
    reach: float

    def __str__(self) -> str:
        return f"step size {self.size:.2g}" + (f", reach {self.reach:.2g}" if self.reach != 1 else "")

    @property
    def time(self) -> float:
        """The step size of SGLD that moves flat directions as far."""
        return self.size * self.reach

    def friction(self, sampler: Sampler) -> float | None:
        if sampler == "sgld":
            return None
        kept = (self.reach - 1) / (self.reach + 1)
        return math.inf if kept <= 0 else -math.log(kept) / math.sqrt(self.size)

    def agrees(self, other: _Step) -> bool:
        """Return whether both numbers are within a factor of 2."""
        pairs = ((self.size, other.size), (self.reach, other.reach))
        return all(one / 2 <= two <= 2 * one for one, two in pairs)

    def within(self, limit: _Step) -> _Step:
        """Return the smaller ε and, of ε times reach, the smaller, too."""
        size = min(self.size, limit.size)
        return _Step(size, max(1.0, min(self.time, limit.time) / size))

    def towards(self, other: _Step) -> _Step:
        """Return the other one, or as near to it as a change by 10 comes."""

        def near(now: float, wanted: float) -> float:
            return min(max(wanted, now / _LARGEST_CHANGE), now * _LARGEST_CHANGE)

        return _Step(near(self.size, other.size), near(self.reach, other.reach))


@can_be_silent
def choose_sgld_settings(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    batch_size: int,
    num_burnin_steps: int,
    sampler: Sampler = "averaged",
    nbeta: float | None = None,
    localization: float | None = None,
    bias: float = 0.025,
    num_chains: int = 4,
    num_steps: int = 100,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
    progress: bool | str = True,
    callback: Callable[[PilotsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int,
) -> SGLDSettings:
    """Choose step size, friction and localization for `estimate_llc`.

    Three limits, with m = 1 but for the sampler "underdamped", where m is `UnderdampedLangevin.reach`:

        stability      ε (nbeta λmax + γ)/4 <= 0.1; the limit of stable steps is 1,
        bias           ε nbeta [T + m nbeta tr(C_B)]/8 <= bias × estimate, where T = tr(H) for "sgld" and 0 else,
        relaxation     m ε γ num_burnin_steps >= 3: flat directions relax in 1/(m ε γ) steps.

    The left side of the second is what a finite step adds to the estimate of a quadratic, to first order; C_B is
    the covariance of a batch's gradient, and m <= 1/sqrt(ε γ), where flat directions are damped critically. λmax,
    tr(H) and C_B are measured where chains have gone, because at a singular point the Hessian at w0 says nothing:
    pilots last one relaxation time, and ε, m and γ are corrected until they agree. A localization that is not
    given is the weakest that the burn-in can follow.

    Args:
        model: as for `estimate_llc`.
        loss: likewise.
        data: likewise.
        batch_size: likewise.
        num_burnin_steps: of the estimate to come.
        sampler: "sgld"; "averaged", SGLD with the average of consecutive noises, whose bias is smaller by that of
            tr(H), at the same cost; "underdamped", which reaches further where the curvature limits the step,
            but whose chains leave for steep places now and then on narrow networks of many layers: there single
            estimates missed the exact value by more than the bias that is allowed, within their own standard
            error, so that no problem told. Read that error, and take more chains, or "averaged".
            On deep linear layers with noisy batches, at equal steps (`make bench-llc`), "averaged" is nearer to
            the exact value beyond the smallest, where the two differ by no more than their errors: the default.
        nbeta: None: n / ln n.
        localization: None: chosen.
        bias: allowed share of the estimate.
        num_chains: of a pilot.
        num_steps: of a pilot at least.
        weights: as for `estimate_llc`.
        chunk_size: as for `estimate_llc`; 1 for models that `vmap` does not take.
        progress: show a bar of the pilots, at most 8.
        callback: called with the `PilotsState` after each.
        checkpoint: file in which that is kept; the same call goes on there.
        generator: or a seed; the only source of randomness.

    Warns:
        SettingsWarning: no settings keep the limits, flat directions do not relax in the burn-in, the
            localization's cut-off is above the curvature, or the pilots' estimate is 0 within its error.

    Cost: at most 8 pilots of the larger of `num_steps` and, mostly, a third of the burn-in; 96 Hessian products of
    a batch for each.
    """
    whole("num_burnin_steps", num_burnin_steps)
    whole("num_chains", num_chains)
    whole("num_steps", num_steps, least=2)
    whole("batch_size", batch_size)
    if not 0 < real("bias", bias) < 1:
        raise ValueError(f"bias lies between 0 and 1, got {bias}")
    if sampler not in ("sgld", "averaged", "underdamped"):
        raise ValueError(f'sampler must be "sgld", "averaged" or "underdamped", got {sampler!r}')
    generator = generator_of(generator)
    losses = EnsembleLosses(model, loss, data, weights=weights)
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    if localization is not None:
        not_negative("localization", localization)
    search = _Search(
        losses,
        batch_size,
        num_burnin_steps,
        sampler,
        nbeta,
        localization,
        bias,
        num_chains=num_chains,
        num_steps=num_steps,
        chunk_size=chunk_size,
        generator=generator,
    )
    found = iterate(
        search,
        name="pilots, at most 8",
        total=_MAX_ROUNDS,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )
    if found.problem:
        warnings.warn(f"settings not to be used: {found.problem}.", SettingsWarning, stacklevel=3)
    return found


@dataclass(frozen=True)
class PilotsState:
    """Where the search is.

    Attributes:
        next: step of the next pilot.
        last: surface at the ends of the last pilot that did not diverge.
        value: its estimate.
        highest: the highest of a stable one.
        problem: what speaks against `next`.
        report: one sentence a pilot.
        generators: of the chains' seeds, and of the surfaces.
        num_steps: pilots.
        done: `next` agrees with its pilot, or there were enough.
    """

    next: _Step
    last: _Surface
    report: list[str]
    generators: list[torch.Generator]
    value: float = 0.0
    highest: float = 0.0
    problem: str = "every pilot diverged"
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Pilot:
    """What chains of one step size went through: estimate with standard error, surface at their ends."""

    step: _Step
    localization: float
    length: int
    value: float
    error: float
    surface: _Surface

    def __str__(self) -> str:
        return (
            f"{self.length} steps of {self.step}, localization {self.localization:.3g}: "
            f"estimate {self.value:.3g}; there λmax {self.surface.top:.3g}, tr(H) {self.surface.trace:.3g}"
        )


@dataclass(frozen=True)
class _Search:
    """What stays from pilot to pilot, and the limits."""

    losses: EnsembleLosses
    batch_size: int
    num_burnin_steps: int
    sampler: Sampler
    nbeta: float
    localization: float | None
    bias: float
    num_chains: int
    num_steps: int
    chunk_size: int | None
    generator: torch.Generator

    def depends_on(self) -> Mapping[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "chunk_size"}
        return {**own, "loss": self.losses.given_loss}

    def init(self) -> PilotsState:
        probe = torch.Generator(self.losses.start.device).manual_seed(_seed(self.generator))
        surface = _measure(self.losses, self.losses.start, self.batch_size, probe)
        step = _Step(4 * _STABILITY / (self.nbeta * surface.top) if surface.top > 0 else 1 / self.nbeta, reach=1.0)
        report = f"at w0: λmax {surface.top:.3g}, tr(H) {surface.trace:.3g}; first step size {step.size:.2g}"
        return PilotsState(step, surface, [report], [self.generator, probe])

    def step(self, state: PilotsState) -> PilotsState:
        step, number = state.next, state.num_steps + 1
        state = replace(state, num_steps=number, done=number == _MAX_ROUNDS)
        found = self.pilot(step, *state.generators)
        if found is None:
            text = f"pilot {number}: diverged at step size {step.size:.2g}; a tenth of it next"
            return replace(state, next=_Step(step.size / 10, step.reach), report=[*state.report, text])
        added = self.added(step, found.surface)
        # A small step takes a pilot less far, so its own estimate is too low to compare with: the highest counts.
        highest = max(state.highest, found.value) if added <= found.value / 2 else state.highest
        wanted = self.wanted(found, highest if highest > 0 else max(found.value, 0.0))
        text = f"pilot {number}: {found}, so they add {added:.2g}; wanted {wanted}"
        state = replace(
            state, last=found.surface, value=found.value, highest=highest, report=[*state.report, text]
        )
        if step.agrees(wanted):
            step = step.within(wanted)
            return replace(state, next=step, problem=self.unusable(found, step), done=True)
        problem = (
            f"after {_MAX_ROUNDS} pilots no step size keeps the limits of stability and bias; {step.size:.2g} was "
            "the last. Take more burn-in steps, larger batches or a stronger localization, or look whether w0 is "
            "a minimum at all"
        )
        return replace(state, next=step.towards(wanted), problem=problem)

    def result(self, state: PilotsState) -> SGLDSettings:
        step, problem = state.next, state.problem
        value = state.highest if state.highest > 0 else state.value
        share = self.added(step, state.last) / value if value > 0 else math.nan
        strength = self.localization_of(step)
        how = "as asked" if self.localization is not None else "the weakest that the burn-in can follow"
        chosen = f"chosen: {step} (bias about {100 * share:.0f} %), localization {strength:.3g} ({how})"
        report, friction = (*state.report, problem or chosen), step.friction(self.sampler)
        return SGLDSettings(step.size, strength, self.nbeta, friction, share, value, not problem, problem, report)

    def localization_of(self, step: _Step) -> float:
        if self.localization is not None:
            return self.localization
        return _RELAXATION_TIMES / (step.time * self.num_burnin_steps)

    def relaxation(self, step: _Step) -> float:
        """Return the steps in which a flat direction relaxes."""
        strength = self.localization_of(step)
        return math.inf if strength == 0 else 1 / (step.time * strength)

    def pilot(self, step: _Step, generator: torch.Generator, probe: torch.Generator) -> _Pilot | None:
        """Run chains for a relaxation time, `num_steps` at least, the burn-in at most; None: they diverged."""
        seeds = [_seed(generator) for _ in range(self.num_chains)]
        strength = self.localization_of(step)
        length = max(self.num_steps, math.ceil(min(self.relaxation(step), self.num_burnin_steps)))
        sampler = langevin_sampler(
            self.losses,
            step_size=step.size,
            nbeta=self.nbeta,
            localization=strength,
            batch_size=self.batch_size,
            friction=step.friction(self.sampler),
        )
        traces = run_chains(sampler, seeds, length, chunk_size=self.chunk_size)
        draws = self.nbeta * (traces.losses - traces.start_losses).double()[:, length // 2 :]
        if not bool(torch.isfinite(draws).all() and torch.isfinite(traces.positions).all()):
            return None
        measured = traces.positions[:_MEASURED_CHAINS]
        ends = [_measure(self.losses, end, self.batch_size, probe) for end in measured]
        surface = _Surface(
            top=max(end.top for end in ends),
            trace=fmean(end.trace for end in ends),
            noise=fmean(end.noise for end in ends),
        )
        return _Pilot(step, strength, length, float(draws.mean()), standard_error(draws), surface)

    def added(self, step: _Step, surface: _Surface) -> float:
        """Return what the step's size and the batches' noise add to an estimate."""
        trace = max(surface.trace, 0.0) if self.sampler == "sgld" else 0.0
        return self.nbeta * (step.size * trace + step.time * self.nbeta * surface.noise) / 8

    def wanted(self, pilot: _Pilot, value: float) -> _Step:
        """Return the largest step within the limits; of the underdamped sampler the largest ε, then the reach."""
        stable = 4 * _STABILITY / (self.nbeta * pilot.surface.top + pilot.localization)
        added = self.added(pilot.step, pilot.surface)
        most = pilot.step.time * self.bias * value / added if added > 0 else math.inf  # of ε times reach
        most = most if value > 0 else pilot.step.time / _LARGEST_CHANGE  # chains that fall: stay nearer to w0
        size = min(stable, most)
        if self.sampler != "underdamped":
            return _Step(size, 1.0)
        critical = 1 / math.sqrt(size * pilot.localization) if pilot.localization > 0 else _MAX_REACH
        return _Step(size, max(1.0, min(most / size, critical, _MAX_REACH)))

    def unusable(self, pilot: _Pilot, step: _Step) -> str:
        """Return why a step that agrees with its pilot is of no use; empty where it is."""
        cutoff, relaxation = self.localization_of(step) / self.nbeta, self.relaxation(step)
        if cutoff > pilot.surface.top:
            return (
                f"the cut-off localization/nbeta = {cutoff:.3g} is above the largest curvature, "
                f"{pilot.surface.top:.3g}: take more burn-in steps"
            )
        if relaxation > self.num_burnin_steps:
            return (
                f"flat directions relax in {relaxation:,.0f} steps, the burn-in has {self.num_burnin_steps:,}: "
                'take more of them, a stronger localization, or sampler="underdamped"'
            )
        if pilot.value <= NUM_ERRORS_FROM_ZERO * pilot.error:
            return (
                f"the pilot's estimate is 0 within its error, {pilot.value:.2g} ± {pilot.error:.2g}: take more "
                "burn-in steps, and look whether w0 is a minimum at all"
            )
        return ""


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _measure(losses: EnsembleLosses, position: Tensor, batch_size: int, generator: torch.Generator) -> _Surface:
    """Return top eigenvalue and trace of the Hessian of one batch, and the noise of a batch's gradient."""
    full = batch_size >= losses.num_examples
    indices = None if full else losses.draw(_NOISE_BATCHES, batch_size, [generator])[0]
    batch = losses.batch(None) if indices is None else losses.batch(indices[0])

    weights = losses.weights_of(None if indices is None else indices[0], 1)
    hessian = BatchHessian(losses, position, batch, None if weights is None else weights[0])
    trace = hutchinson_trace(hessian, num_matvecs=_TRACE_PROBES, generator=generator)
    # Lanczos finds the largest eigenvalue of either sign: at a saddle the smallest may decide.
    ends = [
        top_eigenvalues(signed, rtol=_EIGENVALUE_RTOL, max_matvecs=LANCZOS_STEPS, generator=generator)
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
