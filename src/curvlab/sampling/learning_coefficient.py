"""The local learning coefficient: what it is estimated to be, and whether to believe it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch
from scipy import stats
from torch import Tensor

from curvlab.sampling.diagnostics import effective_sample_size, split_rhat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RHAT = 1.1  # Gelman et al., Bayesian Data Analysis (3rd ed.), 11.5
MIN_DRAWS_PER_CHAIN = 5.0  # effective; below, R-hat itself is chance
MAX_DRIFT = 0.1  # of the estimate, between the halves of the draws
_NUM_WINDOWS = 10


@dataclass(frozen=True, eq=False, repr=False)
class LLC:
    """Estimate of the local learning coefficient λ(w0) = nbeta (E[L(w)] - L(w0)) (Lau et al. 2023).

    E is over the density exp(-nbeta L(w) - localization/2 |w - w0|²), so at finite n and localization it is not
    yet the coefficient of the asymptotics: localization takes from directions with nbeta × eigenvalue below it.
    Where w0 is not quite a minimum, the estimate is too low by `descent_to_minimum`; `problems` notices only when
    it falls below zero.

    Attributes:
        value: mean over chains. Unit: none (parameters, twice: P/2 for a regular model).
        stderr: standard deviation between chains over sqrt(C); from the draws' effective number with one chain.
        per_chain: (C,) estimates.
        wbic: n E[L] = n initial_loss + value n/nbeta, nats when L is a negative log-likelihood; Watanabe's
            (2013) WBIC for nbeta = n/ln n. Saghir et al. (2024), Eq. 18 (they print β = ln n for 1/ln n).
        wbic_stderr: of wbic, from `stderr`.
        initial_loss: L(w0) over all the data.
        rhat: split R-hat of the draws.
        ess: effective number of draws, all chains.
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
    problems: tuple[str, ...]
    losses: Tensor
    burnin_losses: Tensor
    nbeta: float
    step_size: float
    localization: float
    num_examples: int
    num_gradients: int

    def __repr__(self) -> str:
        """Return two lines: the value and its error, then cost and mixing; a line more for each problem."""
        chains, draws = self.losses.shape
        lines = [
            f"LLC {self.value:.4g} ± {self.stderr:.2g} (standard error, {chains} chains x {draws} draws)",
            f"  {self.num_gradients:,} example gradients, R-hat {self.rhat:.3f}, {self.ess:.0f} effective draws, "
            f"nbeta {self.nbeta:.4g}, step size {self.step_size:.2g}, localization {self.localization:.4g}",
        ]
        return "\n".join([*lines, *(f"  not to be used: {problem}" for problem in self.problems)])

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        chains, draws = self.losses.shape
        rows = {
            "LLC": f"{self.value:.4g} ± {self.stderr:.2g}",
            "WBIC (nats)": f"{self.wbic:.5g} ± {self.wbic_stderr:.2g}",
            "draws": f"{chains} x {draws}, {self.ess:.0f} effective, R-hat {self.rhat:.3f}",
            "example gradients": f"{self.num_gradients:,}",
        }
        rows |= {"not to be used": "<br>".join(map(escape, self.problems))} if self.problems else {}
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<table>{cells}</table>"

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


def summarise(
    excess: Tensor,
    burnin_excess: Tensor,
    *,
    initial_loss: float,
    nbeta: float,
    step_size: float,
    localization: float,
    num_examples: int,
    num_gradients: int,
) -> LLC:
    """Return the LLC from (C, draws) values of L_B(w) - L_B(w0), and (C, steps) of the burn-in."""
    coefficients = nbeta * excess.double().cpu()
    burnin = nbeta * burnin_excess.double().cpu()
    per_chain = coefficients.mean(1)
    value = float(per_chain.mean())
    rhat, ess = split_rhat(coefficients), effective_sample_size(coefficients)
    if len(per_chain) > 1:
        stderr = float(per_chain.std()) / math.sqrt(len(per_chain))
    else:
        stderr = float(coefficients.std()) / math.sqrt(ess) if ess > 0 else math.nan
    return LLC(
        value=value,
        stderr=stderr,
        per_chain=per_chain,
        wbic=num_examples * (initial_loss + value / nbeta),
        wbic_stderr=num_examples * stderr / nbeta,
        initial_loss=initial_loss,
        rhat=rhat,
        ess=ess,
        problems=_problems(coefficients, burnin, rhat=rhat, ess=ess),
        losses=initial_loss + coefficients / nbeta,
        burnin_losses=initial_loss + burnin / nbeta,
        nbeta=nbeta,
        step_size=step_size,
        localization=localization,
        num_examples=num_examples,
        num_gradients=num_gradients,
    )


def _problems(coefficients: Tensor, burnin: Tensor, *, rhat: float, ess: float) -> tuple[str, ...]:
    if not bool(torch.isfinite(coefficients).all() and torch.isfinite(burnin).all()):
        return ("a chain diverged (loss inf or NaN): take a smaller step_size, e.g. a tenth.",)
    found = []
    num_chains, num_draws = coefficients.shape
    if rhat > MAX_RHAT:
        found.append(
            f"the chains have not mixed: R-hat {rhat:.2f} is above {MAX_RHAT}. Take more burn-in steps and "
            "draws, a larger step_size if it is far below its limit, or a larger localization."
        )
    elif math.isnan(rhat) or not ess >= MIN_DRAWS_PER_CHAIN * num_chains:
        found.append(
            f"too few draws to see whether the chains have mixed: {num_draws} of each chain are worth "
            f"{ess / num_chains:.1f}, at least {MIN_DRAWS_PER_CHAIN:g} are needed. Take more draws."
        )
    if (drift := _drift(coefficients)) is not None:
        found.append(
            f"the loss still moves: between the halves of the draws the estimate changes by {100 * drift:.0f} %. "
            "Take more burn-in steps, or a larger localization."
        )
    if (lowest := _below_start(torch.cat([burnin, coefficients], dim=1), coefficients)) is not None:
        found.append(
            f"the loss falls below the start (by {-lowest:.3g} in units of the estimate): w0 is no minimum at "
            "this localization, and this is no learning coefficient. Train further, or take a larger localization."
        )
    return tuple(found)


def _drift(coefficients: Tensor) -> float | None:
    """Return the relative change between halves if it is large, and not chance at 1 in 1000."""
    half = coefficients.shape[1] // 2
    if half == 0 or len(coefficients) < 2:
        return None
    changes = coefficients[:, -half:].mean(1) - coefficients[:, :half].mean(1)
    share = float(changes.mean()) / max(abs(float(coefficients.mean())), 1e-300)
    return share if abs(share) > MAX_DRIFT and _is_significant(changes) else None


def _below_start(trace: Tensor, coefficients: Tensor) -> float | None:
    """Return the lowest window of the trace, burn-in included, if it is below the start beyond chance."""
    value = float(coefficients.mean())
    if value < 0:
        return value
    windows = torch.stack(
        [part.mean(1) for part in trace.tensor_split(min(_NUM_WINDOWS, trace.shape[1]), dim=1)], dim=1
    )
    if len(windows) < 2:
        lowest = float(windows.min())
        return lowest if lowest < -MAX_DRIFT * value else None
    means = windows.mean(0)
    window = int(means.argmin())
    lowest = float(means[window])
    return lowest if lowest < -MAX_DRIFT * value and _is_significant(windows[:, window]) else None


def _is_significant(values: Tensor) -> bool:
    stderr = float(values.std()) / math.sqrt(len(values))
    return abs(float(values.mean())) > stats.t.ppf(0.9995, len(values) - 1) * stderr
