"""The local learning coefficient at a model's parameters: its estimate, and whether to believe it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.iterate import Checkpoint
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.ranks import Ranks
from curvlab.sampling.chains import ChainsState, run_chains, run_chains_over_ranks
from curvlab.sampling.diagnostics import (
    STRICT_DRAWS_PER_CHAIN,
    STRICT_RHAT,
    effective_sample_size,
    problems_of,
    split_rhat,
    standard_error,
)
from curvlab.sampling.ends import measure_ends
from curvlab.sampling.settings import SGLDSettings, chosen_sampler
from curvlab.sampling.sgld import RMSProp
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, new_figure
from curvlab.training import EnsembleLosses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEASURED = ("stability", "top_eigenvalue", "unheld_value", "settings_problem")


@dataclass(frozen=True, eq=False, repr=False)
class LLC(Shown):
    """Estimate of the local learning coefficient λ(w0) = nbeta (E[L(w)] - L(w0)) (Lau et al. 2023).

    E is over the density exp(-nbeta L(w) - localization/2 |w - w0|²), so at finite n and localization it is not
    yet the coefficient of the asymptotics: localization takes from directions with nbeta × eigenvalue below it.
    Where w0 is no minimum, the estimate is too low by `descent_to_minimum`, which `from_lowest_point` adds;
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
        stability: step_size (nbeta λmax + localization)/4 where the chains ended, a problem above 0.25: at 1 steps
            are unstable, and already below that the estimate is too high. nan where it was not measured.
        top_eigenvalue: λmax of the loss's Hessian there, see `ChainEnds`.
        unheld_value: the estimate that the localization alone would give; a problem where `value` comes within
            a fifth of it, see `ChainEnds`.
        settings_problem: what `choose_sgld_settings` found wrong with its settings, in `problems`, too.
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
    stability: float = math.nan
    top_eigenvalue: float = math.nan
    unheld_value: float = math.nan
    settings_problem: str = ""

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
                *([] if math.isnan(self.stability) else [f"stability {self.stability:.2g}"]),
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
            ax = new_figure().add_subplot()
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
        """Whether no problem was found."""
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
        names = ("initial_loss", "nbeta", "step_size", "localization", "num_examples", "num_gradients", *_MEASURED)
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
        **measured: Any,
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
            measured: `stability`, `top_eigenvalue`, `unheld_value` and `settings_problem`, where they are known.
        """
        coefficients = nbeta * excess.double().cpu()
        burnin = nbeta * burnin_excess.double().cpu()
        per_chain = coefficients.mean(1)
        value = float(per_chain.mean())
        ess, ess_tail = (effective_sample_size(coefficients, kind) for kind in ("bulk", "tail"))
        mixing: dict[str, Any] = {"rhat": split_rhat(coefficients), "ess": ess, "ess_tail": ess_tail}
        mixing["stderr"] = stderr = standard_error(coefficients)
        return cls(
            value=value,
            per_chain=per_chain,
            wbic=num_examples * (initial_loss + value / nbeta),
            wbic_stderr=num_examples * stderr / nbeta,
            initial_loss=initial_loss,
            problems=problems_of(
                coefficients, burnin, **mixing, descent=descent, cutoff=localization / nbeta, **measured
            ),
            losses=initial_loss + coefficients / nbeta,
            burnin_losses=initial_loss + burnin / nbeta,
            nbeta=nbeta,
            step_size=step_size,
            localization=localization,
            num_examples=num_examples,
            num_gradients=num_gradients,
            **mixing,
            **measured,
        )

    def from_lowest_point(self, descent: float) -> LLC:
        """Return what the same chains give measured from the lowest point near w0: `value` is larger by `descent`.

        `initial_loss` is the loss there, and `problems` are those of the new value: that the loss falls below w0
        is none where it stays above that point. WBIC and mixing are the same.

        Args:
            descent: `descent_to_minimum` with the same nbeta and localization.
        """
        if not 0 <= descent < math.inf:
            raise ValueError(f"descent must be finite and not negative, got {descent}; see `descent_to_minimum`.")
        kept, fall = self.traces(), descent / self.nbeta
        moved = {name: kept.pop(name) + fall for name in ("excess", "burnin_excess")}
        moved["unheld_value"] = kept.pop("unheld_value") + descent
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


@can_be_silent
def estimate_llc(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    num_chains: int,
    num_draws: int,
    num_burnin_steps: int,
    batch_size: int,
    step_size: float | None = None,
    nbeta: float | None = None,
    localization: float | None = None,
    friction: float | None = None,
    settings: SGLDSettings | None = None,
    steps_per_draw: int = 1,
    preconditioner: RMSProp | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    checkpoint: str | Path | Checkpoint | None = None,
    callback: Callable[[ChainsState], object] | None = None,
    ranks: Ranks | None = None,
    generator: torch.Generator | int,
) -> LLC:
    """Estimate λ(w0) = nbeta (E[L(w)] - L(w0)) at the parameters w0 with Langevin chains (Lau et al. 2023).

    E is over exp(-nbeta L(w) - localization/2 |w - w0|²), sampled by independent chains (see `SGLD`, and
    `UnderdampedLangevin` where there is a friction). L(w0) is over all the data, and each draw is compared with
    L_B(w0) on its own batch: unbiased, without most of the batch's noise. The model is copied into eval mode and
    never changed. Look at `problems` before using `value`.

    Args:
        model: any module. Parameters that require gradients move, all others stay. Or a `Problem` in the place of
            model, loss, data and weights.
        loss: mean over examples: nn.CrossEntropyLoss(), ..., or a function of (outputs, targets).
        data: the training data: a pair of tensors (fastest, on the model's device), a dataset, or batches.
            Of a DataLoader the examples drawn at each step go through its collator, which may pad them.
        num_chains: C, each from w0 with its own batches and noise. The interval is over chains: 4 or more.
        num_draws: of each chain, after burn-in.
        num_burnin_steps: steps before, in no estimate.
        batch_size: of a chain's step, drawn with replacement; from n on, all the data at each step.
        step_size: ε; `choose_sgld_settings` finds one. A step too large for the curvature where the chains end
            is among `problems` (`LLC.stability`). What the batches' noise adds is not: halve ε, and compare.
        nbeta: inverse temperature times n; None: n / ln n, n the number of examples of `data`.
        localization: γ; None: 1, which is weak. `choose_sgld_settings` finds one that the burn-in can follow.
        friction: of `UnderdampedLangevin`; math.inf averages consecutive noises; None: SGLD.
        settings: of `choose_sgld_settings`, in place of the four before; what it found wrong with them is among
            `problems`.
        steps_per_draw: a draw is the mean of so many steps' losses.
        preconditioner: of the steps, learned in half the burn-in; None: plain SGLD. `RMSProp` moves parameters of
            small gradients further. Its step size has another scale: SGLD's times its damping is a start.
        weights: w of the examples, (N,), not negative, where L is the weighted mean 1/N Σ_i w_i l_i, as that of
            `DataOperator.weighted`; in the order of the data. Chains draw examples uniformly all the same.
        chunk_size: chains computed at once, None: chosen (see `run_chains`). The result is the same for any, to
            rounding.
        progress: show a bar on a terminal or in a notebook.
        checkpoint: folder where chains are kept, saved every minute, removed at the end: after a kill the same
            call goes on there and ends at the same numbers, also with other `num_draws`.
        callback: see `run_chains`.
        ranks: processes that share the chains; None: this one runs all. Rank r of R runs the chains r, r + R, ...;
            every rank gets the same estimate, which does not depend on R but for rounding. All of them hold the
            model and all the data; `checkpoint` is a folder that all of them see.
        generator: or a seed; it seeds the chains' generators, and its state alone decides the result. The same on
            every rank.

    Cost: C (num_burnin_steps + num_draws steps_per_draw) forward and backward passes of a batch, as many times P
    normals, and what `measure_ends` costs, about 1 % of them; memory of 3 C P numbers (4 with a friction) and of
    a chunk's activations.
    """
    for name, count in (("num_chains", num_chains), ("num_draws", num_draws), ("steps_per_draw", steps_per_draw)):
        whole(name, count)
    whole("num_burnin_steps", num_burnin_steps, least=0)
    generator = generator_of(generator)
    losses = EnsembleLosses(model, loss, data, weights=weights)
    sampler = chosen_sampler(
        losses,
        settings,
        step_size=step_size,
        nbeta=nbeta,
        localization=localization,
        friction=friction,
        batch_size=batch_size,
        preconditioner=preconditioner,
        num_burnin_steps=num_burnin_steps,
    )
    seeds = torch.randint(2**62, (num_chains,), generator=generator, device=generator.device).tolist()
    num_steps = num_burnin_steps + num_draws * steps_per_draw
    run = run_chains if ranks is None else partial(run_chains_over_ranks, ranks)
    traces = run(
        sampler,
        seeds,
        num_steps,
        chunk_size=chunk_size,
        progress=progress,
        checkpoint=checkpoint,
        callback=callback,
    )
    ends = measure_ends(sampler, traces, seed=seeds[0])
    excess = (traces.losses - traces.start_losses).double()
    return LLC.of_traces(
        excess[:, num_burnin_steps:].view(num_chains, num_draws, steps_per_draw).mean(2),
        excess[:, :num_burnin_steps],
        initial_loss=float(losses.start_losses.double().mean()),
        nbeta=sampler.nbeta,
        step_size=sampler.step_size,
        localization=sampler.localization,
        num_examples=losses.num_examples,
        num_gradients=num_chains * num_steps * min(batch_size, losses.num_examples),
        settings_problem="" if settings is None else settings.problem,
        **asdict(ends),
    )
