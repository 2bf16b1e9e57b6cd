"""Why an estimate of the learning coefficient is not to be used, from what its chains went through.

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
too. What these limits, and the drift's, find and miss is a table: `experiments/benchmarks/llc/power.py`.
"""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from curvlab.sampling.diagnostics import drift

STRICT_RHAT, STRICT_DRAWS_PER_CHAIN = 1.01, 100.0  # Vehtari et al. (2021)
MAX_RHAT, MIN_DRAWS_PER_CHAIN = 1.1, 10.0  # Gelman et al. (2013); effective draws, bulk and tail
MAX_DRIFT = 0.1  # of the estimate, over the trace
MAX_DESCENT = 0.1  # of the value from the minimum
_FALSE_ALARMS = 0.01  # of the drift's test, and of the dip's over all its windows
_NUM_WINDOWS = 10


def problems_of(
    coefficients: Tensor, burnin: Tensor, *, rhat: float, ess: float, ess_tail: float, descent: float
) -> tuple[str, ...]:
    """Return one sentence for each problem; none where nothing was found.

    Args:
        coefficients: (C, T), nbeta (L_B(w) - L(start)), the draws.
        burnin: (C, steps), the same before them.
        rhat: of the draws.
        ess: bulk, of the draws.
        ess_tail: tail, of the draws.
        descent: of the start to the minimum near it, in the same unit; 0 where it is not known.
    """
    if not bool(torch.isfinite(coefficients).all() and torch.isfinite(burnin).all()):
        return ("a chain diverged (loss inf or NaN): take a smaller step_size, e.g. a tenth.",)
    found = []
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
    if descent > MAX_DESCENT * abs(from_minimum := float(coefficients.mean()) + descent):
        found.append(
            f"the start lies above the minimum near it: the estimate lacks {descent:.3g} of {from_minimum:.4g}, "
            "its value from there. Take `from_minimum`, or train further."
        )
    return tuple(found)


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
