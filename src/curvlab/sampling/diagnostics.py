"""What chains say of themselves: mixed, worth so many draws, at rest; and why an estimate is not to be used.

Limits of mixing. Vehtari et al. (2021) take both numbers of the draws themselves, R-hat below 1.01 and, at four
chains, 400 effective draws, in the bulk and in the tails. The two ask for the same: 2 C half chains worth S
draws have R-hat² - 1 near 2 C/S, so 1.01 is 100 draws for each chain. That is for quantiles of any quantity. A
learning coefficient is a mean, and a figure's estimate has four chains of 80 to 330 draws, few of which are
worth 400: an estimate has to keep the older limits of Gelman et al. (2013, Bayesian Data Analysis, Sec. 11.4
and 11.5), R-hat below 1.1 and ten effective draws for each chain, which ask for the same, too, and leave an
error of C^(-1/2)/3 standard deviations of the draws. (Theirs are of the split R-hat and the effective draws of a
mean; here both are rank-normalised, R-hat also of the folded draws, and the draws count in the tails, too.)
`LLC.strictly_mixed` says whether it keeps those of Vehtari et al.

R-hat is taken of the draws, not of means of several, although a batch's noise hides chains apart in part: the
limit is derived for draws. Of means of five, where half the variance is that noise, 8 to 13 % of made-up
estimates worth 120 draws, three times what is asked for, exceeded 1.1 (none, taken of the draws). What the
noise hides is small against the error of the mean, and the effective number counts what lies between chains,
too. What these limits, and the drift's, find and miss is a table: `experiments/benchmarks/llc/peers.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from arviz_stats.base import array_stats
from scipy import stats
from torch import Tensor

from curvlab.arguments import tensor

STRICT_RHAT, STRICT_DRAWS_PER_CHAIN = 1.01, 100.0  # Vehtari et al. (2021)
MAX_RHAT, MIN_DRAWS_PER_CHAIN = 1.1, 10.0  # Gelman et al. (2013); effective draws, bulk and tail
MAX_DRIFT = 0.1  # of the estimate, over the trace
MAX_DESCENT = 0.1  # of the value from the lowest point
MAX_STABILITY = 0.25  # of a step; 1 is the limit, where the steepest direction has no variance any more
MAX_UNHELD = 0.8  # of the estimate that the localization alone would give
NUM_ERRORS_FROM_ZERO = 2.0  # standard errors

_FALSE_ALARMS = 0.01  # of the tests of drift and highest draw, and of the dip's over all its windows
_NUM_WINDOWS = 10
_MIN_DRAWS = 8  # of a chain, four of each half: below, autocorrelations are none


@dataclass(frozen=True)
class Drift:
    """How much chains move from their first draw to their last, along a straight line.

    Attributes:
        change: over the whole trace, in the draws' unit.
        stderr: of it, from the draws' effective number.
    """

    change: float
    stderr: float

    @property
    def z(self) -> float:
        """The change in standard errors; nan where there is none."""
        return self.change / self.stderr if self.stderr > 0 else math.nan


def split_rhat(draws: Tensor) -> float:
    """Return rank-normalised split R-hat of (C, T) draws (Vehtari et al. 2021, Sec. 4).

    sqrt([(N-1)/N W + B/N] / W) with N = T/2, W the mean variance within half chains and B/N the variance of their
    means, of normal scores of the draws' ranks; the larger of that and of the same for the distances from the
    median, which sees chains that differ in width alone. 1 when all halves look alike. One chain is taken for the
    two that its halves are. nan with fewer than 8 draws of each chain or without any variance.
    """
    values = _usable(draws)
    if values is None:
        return math.nan
    if len(values) == 1:
        half = values.shape[1] // 2
        values = np.concatenate([values[:, :half], values[:, -half:]])
    return float(array_stats.rhat(values)) if values.shape[1] >= 4 else math.nan


def effective_sample_size(draws: Tensor, kind: Literal["mean", "bulk", "tail"] = "mean") -> float:
    """Return how many independent draws (C, T) are worth, chains taken together; at most C T log10(C T).

    C T / (1 + 2 sum of autocorrelations), on half chains, with the variance of R-hat in the denominator, so that
    chains in different places are worth little; the sum ends as in Geyer (1992). For the error of the mean
    (`mean`), of normal scores of ranks (`bulk`), and the smaller of those of the 5 % and 95 % quantiles (`tail`)
    (Vehtari et al. 2021, Sec. 4). nan where R-hat is.
    """
    values = _usable(draws)
    if values is None:
        return math.nan
    return float(array_stats.ess(values, method=kind, **({"prob": 0.05} if kind == "tail" else {})))


def standard_error(draws: Tensor) -> float:
    """Return that of the mean of (C, T) draws: between chains; of one chain from its effective number."""
    if len(draws) > 1:
        return float(draws.mean(1).std()) / math.sqrt(len(draws))
    return float(draws.std()) / math.sqrt(effective_sample_size(draws))


def drift(draws: Tensor) -> Drift:
    """Return the change over (C, T) draws along the least-squares line that all chains share.

    For T draws at equal distances from -1/2 to 1/2, t, with residuals r of effective number S, the variance is
    var(r)/S × T / sum t², about 12 times that of the mean. Chains are pooled: what they have in common counts, and
    S, which holds their autocorrelation and what is between them, says how much of it is chance. Where the draws
    are worth fewer than ten for each chain, S is chance itself, and too large on average.
    """
    values = _usable(draws)
    if values is None:
        return Drift(math.nan, math.nan)
    place = np.linspace(-0.5, 0.5, values.shape[1])
    spread = float(place @ place)
    change = float((values @ place).mean()) / spread
    residuals = values - change * place
    worth = float(array_stats.ess(residuals, method="mean"))
    return Drift(change, math.sqrt(float(residuals.var(ddof=1)) / worth * len(place) / spread))


def _usable(draws: Tensor) -> np.ndarray | None:
    values = tensor("draws", draws, ndim=2, shape="(chains, draws)").double().cpu().numpy()
    usable = values.shape[1] >= _MIN_DRAWS and bool(np.isfinite(values).all())
    return values if usable and np.ptp(values) > 0 else None


def problems_of(
    coefficients: Tensor,
    burnin: Tensor,
    *,
    rhat: float,
    ess: float,
    ess_tail: float,
    stderr: float,
    descent: float = 0.0,
    cutoff: float = 0.0,
    stability: float = math.nan,
    top_eigenvalue: float = math.nan,
    unheld_value: float = math.nan,
    settings_problem: str = "",
) -> tuple[str, ...]:
    """Return one sentence for each problem; none where nothing was found.

    Args:
        coefficients: (C, T), nbeta (L_B(w) - L(start)), the draws.
        burnin: (C, steps), the same before them.
        rhat: of the draws.
        ess: bulk, of the draws.
        ess_tail: tail, of the draws.
        stderr: of the estimate, the mean of the draws.
        descent: of the start to the minimum near it, in the same unit; 0 where it is not known.
        cutoff: localization/nbeta, loss per squared parameter.
        stability: as in `LLC`, nan where it was not measured; the same for the next two.
        top_eigenvalue: of the loss's Hessian, where the chains ended.
        unheld_value: as in `LLC`.
        settings_problem: what `choose_sgld_settings` found wrong with the settings.
    """
    if not bool(torch.isfinite(coefficients).all() and torch.isfinite(burnin).all()):
        return ("a chain diverged (loss inf or NaN): take a smaller step_size, e.g. a tenth.",)
    found = [f"the settings are not to be used: {settings_problem}"] if settings_problem else []
    value = float(coefficients.mean())
    found += _problems_of_ends(
        value + NUM_ERRORS_FROM_ZERO * stderr,
        cutoff=cutoff,
        stability=stability,
        top_eigenvalue=top_eigenvalue,
        unheld_value=unheld_value,
    )
    if abs(value) <= NUM_ERRORS_FROM_ZERO * stderr:
        found.append(
            f"the estimate is 0 within its error: {value:.2g} ± {stderr:.2g}. Take a weaker localization, which "
            "needs more steps, or more draws."
        )
    num_chains, num_draws = coefficients.shape
    worth = min(ess, ess_tail)
    if rhat > MAX_RHAT:
        found.append(
            f"the chains have not mixed: R-hat {rhat:.2f} is above {MAX_RHAT}. Take more burn-in steps and "
            "draws, a larger step_size if it is far below its limit, or a larger localization."
        )
    elif math.isnan(rhat) or not worth >= MIN_DRAWS_PER_CHAIN * num_chains:
        found.append(
            f"too few draws to see whether the chains have mixed: {num_draws} of each chain are worth "
            f"{worth / num_chains:.1f}, at least {MIN_DRAWS_PER_CHAIN:g} are needed. Take more draws."
        )
    if (most := _most(coefficients)) < (highest := float(coefficients.max())):
        found.append(
            f"a chain was thrown off: its highest draw is {highest:.3g}, and in equilibrium none is above "
            f"{most:.3g}. On its way the curvature made the step unstable. Take a smaller step_size, or a larger "
            "localization."
        )
    if (moved := _moved(coefficients)) is not None:
        found.append(
            f"the loss still moves: over the draws the estimate changes by {100 * moved:.0f} %. "
            "Take more burn-in steps, or a larger localization."
        )
    if (lowest := _below_start(burnin, coefficients, worth=ess)) is not None:
        found.append(
            f"the loss falls below the start (by {-lowest:.3g} in units of the estimate): w0 is no minimum at "
            "this localization, and this is no learning coefficient. Train further, or take a larger localization."
        )
    if descent > MAX_DESCENT * abs(lowest := value + descent):
        found.append(
            f"the start lies above the minimum near it: the estimate lacks {descent:.3g} of {lowest:.4g}, "
            "its value from there. Take `from_lowest_point`, or train further."
        )
    return tuple(found)


def _problems_of_ends(
    most: float, *, cutoff: float, stability: float, top_eigenvalue: float, unheld_value: float
) -> list[str]:
    found = []
    if stability > MAX_STABILITY:
        found.append(
            "the step is too large where the chains are: step_size (nbeta λmax + localization)/4 is "
            f"{stability:.2g}, with λmax {top_eigenvalue:.3g}, and at most {MAX_STABILITY} is sound; at 1 steps "
            "are unstable. Take a smaller step_size, or a larger localization."
        )
    if cutoff > top_eigenvalue:
        found.append(
            f"the localization holds every direction: its cut-off, localization/nbeta = {cutoff:.3g}, is above "
            f"the largest curvature, {top_eigenvalue:.3g}. The estimate is near 0 whatever the model is. Take a "
            "weaker localization, and as many more steps."
        )
    if most > MAX_UNHELD * unheld_value:
        found.append(
            "the loss did not hold the chains: they are where their localization alone would take them, at an "
            f"estimate of {unheld_value:.2g}. Take a weaker localization, and more steps."
        )
    return found


def _most(coefficients: Tensor) -> float:
    """Return what no draw exceeds, beyond chance, of the density that is sampled.

    Of N draws of U = nbeta (L(w) - L(w0)) the largest is above 2 λ + 2 ln(N/α) with probability α at most: the
    mean of exp(U/2), Z(nbeta/2)/Z(nbeta), is at most exp(λ), λ the estimate at nbeta/2, taken to be the one here.
    A batch's noise is to both sides: as much as twice what the lowest draw lies below the estimate is allowed.
    (Of 1,117 estimates for the figures the furthest took 0.9 of it; chains that a ridge threw off hundreds.)
    """
    value = max(0.0, float(coefficients.mean()))
    below = max(0.0, value - float(coefficients.min()))
    return 2 * (value + math.log(coefficients.numel() / _FALSE_ALARMS) + below)


def _moved(coefficients: Tensor) -> float | None:
    """Return the drift as a share of the estimate if it is large, and not chance at 1 in 100."""
    found = drift(coefficients)
    share = found.change / max(abs(float(coefficients.mean())), 1e-300)
    return share if abs(share) > MAX_DRIFT and abs(found.z) > stats.norm.isf(_FALSE_ALARMS / 2) else None


def _below_start(burnin: Tensor, coefficients: Tensor, *, worth: float) -> float | None:
    """Return the lowest window of the trace, burn-in included, if it is below the start beyond chance.

    A window's standard error is that of the draws, from its share of their effective number, at least one for
    each chain.
    """
    value = float(coefficients.mean())
    if value < 0:
        return value
    trace = torch.cat([burnin, coefficients], dim=1)
    num_chains, num_draws = coefficients.shape
    windows = trace.tensor_split(min(_NUM_WINDOWS, trace.shape[1]), dim=1)
    lowest = min(windows, key=lambda window: float(window.mean()))
    worth = max(num_chains, worth * lowest.shape[1] / num_draws) if worth > 0 else num_chains
    chance = float(coefficients.std()) / math.sqrt(worth) * stats.norm.isf(_FALSE_ALARMS / len(windows))
    mean = float(lowest.mean())
    return mean if mean < -MAX_DRIFT * value and -mean > chance else None
