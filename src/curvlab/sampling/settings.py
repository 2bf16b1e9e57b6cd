"""Step size, friction and localization of an estimate, as chosen or as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from curvlab.sampling.sgld import SGLD, check_nbeta, default_nbeta
from curvlab.sampling.underdamped import langevin_sampler
from curvlab.shown import Shown, Summary, counted
from curvlab.training import EnsembleLosses


@dataclass(frozen=True, repr=False)
class SGLDSettings(Shown):
    """What to call `estimate_llc` with, `settings=`, and why.

    Attributes:
        step_size: ε.
        localization: γ.
        nbeta: that the two are for.
        friction: of `UnderdampedLangevin`, inf for averaged noises; None: `SGLD`.
        bias: predicted bias of the estimate from the finite step size and the batches, as a share of it.
        pilot_llc: the highest estimate of a stable pilot, which `bias` is a share of; rough, as pilots are short.
        converged: the rounds ended at settings that keep all limits.
        problem: why they did not; empty where they did. `estimate_llc` takes it into `LLC.problems`.
        report: what was measured and decided, one sentence an entry.
    """

    step_size: float
    localization: float
    nbeta: float
    friction: float | None
    bias: float
    pilot_llc: float
    converged: bool
    problem: str
    report: tuple[str, ...]

    def summary(self) -> Summary:
        """Return the numbers, the bias that they are predicted to leave, and why they are not to be used."""
        friction = () if self.friction is None else (f"friction {self.friction:.3g}",)
        return Summary(
            "sampler settings:",
            f"step size {self.step_size:.3g}, localization {self.localization:.3g}",
            f"bias about {100 * self.bias:.1f} %",
            (f"nbeta {self.nbeta:.4g}", *friction, counted(len(self.report), "line") + " in report"),
            (self.problem,) if self.problem else (),
        )


def chosen_sampler(
    losses: EnsembleLosses,
    settings: SGLDSettings | None,
    *,
    step_size: float | None,
    nbeta: float | None,
    localization: float | None,
    friction: float | None,
    **others: Any,
) -> SGLD:
    """Return the sampler of an estimate: by `settings`, or by the four numbers in their place.

    Args:
        losses: model, loss and data.
        settings: of `choose_sgld_settings`.
        step_size: ε; needed.
        nbeta: None: n / ln n.
        localization: γ; None: 1.
        friction: None: SGLD.
        others: see `langevin_sampler`.
    """
    if settings is not None and not isinstance(settings, SGLDSettings):
        raise TypeError(f"settings are what choose_sgld_settings(...) returns, got {type(settings).__name__}")
    if settings is not None:
        if not (step_size is nbeta is localization is friction is None):
            raise ValueError(
                "pass either settings, or step_size, nbeta, localization and friction: settings holds all four."
            )
        step_size, nbeta, localization = settings.step_size, settings.nbeta, settings.localization
        friction = settings.friction
    if step_size is None:
        raise ValueError("pass step_size, or settings=choose_sgld_settings(...), which finds one.")
    nbeta = default_nbeta(losses.num_examples) if nbeta is None else nbeta
    check_nbeta(nbeta)
    return langevin_sampler(
        losses,
        step_size=step_size,
        nbeta=nbeta,
        localization=1.0 if localization is None else localization,
        friction=friction,
        **others,
    )
