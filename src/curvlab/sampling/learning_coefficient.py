"""The local learning coefficient: what it is estimated to be, and whether to believe it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor

from curvlab.sampling.diagnostics import effective_sample_size, split_rhat
from curvlab.sampling.problems import STRICT_DRAWS_PER_CHAIN, STRICT_RHAT, problems_of
from curvlab.shown import Shown, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class LLC(Shown):
    """Estimate of the local learning coefficient λ(w0) = nbeta (E[L(w)] - L(w0)) (Lau et al. 2023).

    E is over the density exp(-nbeta L(w) - localization/2 |w - w0|²), so at finite n and localization it is not
    yet the coefficient of the asymptotics: localization takes from directions with nbeta × eigenvalue below it.
    Where w0 is not quite a minimum, the estimate is too low by `descent_to_minimum`, which `from_minimum` adds;
    without it, `problems` notices only when the loss falls below that of w0.

    Attributes:
        value: mean over chains. Unit: none (parameters, twice: P/2 for a regular model).
        stderr: standard deviation between chains over sqrt(C); from the draws' effective number with one chain.
        per_chain: (C,) estimates.
        wbic: n E[L] = n initial_loss + value n/nbeta, nats when L is a negative log-likelihood; Watanabe's
            (2013) WBIC for nbeta = n/ln n. Saghir et al. (2024), Eq. 18 (they print β = ln n for 1/ln n).
        wbic_stderr: of wbic, from `stderr`.
        initial_loss: L(w0) over all the data.
        rhat: rank-normalised split R-hat of the draws.
        ess: effective number of draws, all chains, for the bulk of their distribution.
        ess_tail: the same for its 5 % and 95 % quantiles.
        problems: why the estimate is not to be used, and what to change; empty when nothing was found.
        losses: (C, draws), initial_loss + L_B(w) - L_B(w0): unbiased for L(w), without most of the batch's noise.
        burnin_losses: (C, steps), the same before the draws.
        nbeta, step_size, localization: as used.
        num_examples: n.
        num_gradients: gradients of single examples, all chains.
    """

    value: float
    stderr: float
    per_chain: Tensor
    wbic: float
    wbic_stderr: float
    initial_loss: float
    rhat: float
    ess: float
    ess_tail: float
    problems: tuple[str, ...]
    losses: Tensor
    burnin_losses: Tensor
    nbeta: float
    step_size: float
    localization: float
    num_examples: int
    num_gradients: int

    @property
    def curvature_cutoff(self) -> float:
        """localization/nbeta, loss per squared parameter: eigenvalues of the Hessian below it count little.

        On a quadratic an eigenvalue h adds h/(2 (h + cut-off)) to `value`, half of its 1/2 at the cut-off itself.
        Estimates with different ones are different numbers, not two measurements of one.
        """
        return self.localization / self.nbeta

    def summary(self) -> Summary:
        """Return the value and its error, cost, mixing and settings."""
        chains, draws = self.losses.shape
        return Summary(
            "LLC",
            f"{self.value:.4g} ± {self.stderr:.2g}",
            f"standard error, {chains} chains x {draws} draws",
            (
                f"{self.num_gradients:,} example gradients",
                f"R-hat {self.rhat:.3f}",
                f"{self.ess:.0f} effective draws",
                f"nbeta {self.nbeta:.4g}",
                f"step size {self.step_size:.2g}",
                f"localization {self.localization:.4g}",
            ),
            self.problems,
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw each chain's running estimate, nbeta (mean loss so far - L(w0)), by draw; burn-in before 0.

        A chain that has not mixed, or still drifts, is seen here before any statistic says so.

        Args:
            ax: to draw on; a new figure's by default.

        Returns:
            The axes; `ax.figure.savefig(...)` keeps the picture.
        """
        if ax is None:
            from matplotlib import pyplot as plt  # only who draws waits for it

            ax = plt.figure().add_subplot()
        burnin = self.nbeta * (self.burnin_losses - self.initial_loss)
        draws = self.losses.shape[1]
        running = self.nbeta * ((self.losses - self.initial_loss).cumsum(1) / torch.arange(1, draws + 1))
        for chain, (before, line) in enumerate(zip(burnin, running, strict=True)):
            (drawn,) = ax.plot(range(1, draws + 1), line, linewidth=1, label=f"chain {chain}")
            ax.plot(range(-len(before), 0), before, linewidth=0.5, alpha=0.4, color=drawn.get_color())
        low, high = self.interval()
        ax.axhline(self.value, color="black", linewidth=1, label=f"{self.value:.4g}, 95 % interval")
        ax.axhspan(low, high, color="black", alpha=0.1, linewidth=0)
        ax.set_xlabel("draw (below 0: burn-in, each step's own value)")
        ax.set_ylabel("LLC, mean of the draws so far")
        ax.set_title("" if self.valid else "not to be used: " + "; ".join(self.problems), fontsize=8, wrap=True)
        if len(running) <= 8:
            ax.legend(fontsize=7)
        return ax

    @property
    def valid(self) -> bool:
        """Whether the chains have mixed, and stayed above the start."""
        return not self.problems

    @property
    def strictly_mixed(self) -> bool:
        """Whether R-hat is below 1.01 and both effective numbers reach 100 a chain (Vehtari et al. 2021)."""
        worth = min(self.ess, self.ess_tail) / len(self.per_chain)
        return self.rhat < STRICT_RHAT and worth >= STRICT_DRAWS_PER_CHAIN

    def traces(self) -> dict[str, Any]:
        """Return what `of_traces` takes: (C, draws) and (C, steps) numbers in float32, a few kB, and settings.

        Kept with a result, they can be diagnosed anew, or drawn, without any chain.
        """
        excess, burnin_excess = (part - self.initial_loss for part in (self.losses, self.burnin_losses))
        names = ("initial_loss", "nbeta", "step_size", "localization", "num_examples", "num_gradients")
        kept = {"excess": excess.float(), "burnin_excess": burnin_excess.float()}
        return kept | {name: getattr(self, name) for name in names}

    @classmethod
    def of_traces(
        cls,
        excess: Tensor,
        burnin_excess: Tensor,
        *,
        initial_loss: float,
        nbeta: float,
        step_size: float,
        localization: float,
        num_examples: int,
        num_gradients: int,
        descent: float = 0.0,
    ) -> LLC:
        """Return the LLC from what chains went through.

        Args:
            excess: (C, draws), L_B(w) - L_B(w0) of the draws.
            burnin_excess: (C, steps), the same before them.
            initial_loss: L(w0); the other settings as the attributes.
            nbeta: likewise.
            step_size: likewise.
            localization: likewise.
            num_examples: likewise.
            num_gradients: likewise.
            descent: `descent_to_minimum` of w0, where it is known: above a tenth of the value from the minimum it
                is among `problems`.
        """
        coefficients = nbeta * excess.double().cpu()
        burnin = nbeta * burnin_excess.double().cpu()
        per_chain = coefficients.mean(1)
        value = float(per_chain.mean())
        rhat = split_rhat(coefficients)
        ess, ess_tail = (effective_sample_size(coefficients, kind) for kind in ("bulk", "tail"))
        if len(per_chain) > 1:
            stderr = float(per_chain.std()) / math.sqrt(len(per_chain))
        else:
            stderr = float(coefficients.std()) / math.sqrt(effective_sample_size(coefficients))
        return cls(
            value=value,
            stderr=stderr,
            per_chain=per_chain,
            wbic=num_examples * (initial_loss + value / nbeta),
            wbic_stderr=num_examples * stderr / nbeta,
            initial_loss=initial_loss,
            rhat=rhat,
            ess=ess,
            ess_tail=ess_tail,
            problems=problems_of(coefficients, burnin, rhat=rhat, ess=ess, ess_tail=ess_tail, descent=descent),
            losses=initial_loss + coefficients / nbeta,
            burnin_losses=initial_loss + burnin / nbeta,
            nbeta=nbeta,
            step_size=step_size,
            localization=localization,
            num_examples=num_examples,
            num_gradients=num_gradients,
        )

    def from_minimum(self, descent: float) -> LLC:
        """Return what the same chains give measured from the minimum near w0: `value` is larger by `descent`.

        `initial_loss` is the loss there, and `problems` are those of the new value: that the loss falls below w0
        is none where it stays above the minimum. WBIC and mixing are the same.

        Args:
            descent: `descent_to_minimum` with the same nbeta and localization.
        """
        if not 0 <= descent < math.inf:
            raise ValueError(f"descent must be finite and not negative, got {descent}; see `descent_to_minimum`.")
        kept, fall = self.traces(), descent / self.nbeta
        moved = {name: kept.pop(name) + fall for name in ("excess", "burnin_excess")}
        return LLC.of_traces(**moved, **kept | {"initial_loss": self.initial_loss - fall})

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval: Student's t over chains, C - 1 degrees of freedom (normal for C = 1).

        It covers the mean of the chain's stationary density; not the error of a finite step size, batch or n.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence is a share between 0 and 1, got {confidence}; write 0.95 for 95 %.")
        num_chains = len(self.per_chain)
        tail = 0.5 + confidence / 2
        quantile = stats.t.ppf(tail, num_chains - 1) if num_chains > 1 else stats.norm.ppf(tail)
        return self.value - quantile * self.stderr, self.value + quantile * self.stderr
