"""What tab6 to tab8 judge: how influence correlates with each response, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, Interval, judge, t_interval
from curvlab.lab.reporting.claims import DIRECTION_ONLY, OUT_OF_REACH, REPRODUCED
from experiments.pbrf.correlation_interval import correlation_interval
from experiments.pbrf.correlations import WAYS

Tables: TypeAlias = Mapping[str, pd.DataFrame]  # read once, not at every look

# Of the influence solve; above it what is correlated is not the influence estimate. With eigenvalues on both sides
# of zero a small residual bounds no error: only a solve to rounding is one.
MAX_RESIDUAL = {"gauss_newton": 0.1, "hessian": 1e-6}
WAY_NAMES = {"over_test": "over test examples", "over_points": "over points", "pooled": "over all pairs"}


def judge_correlation(  # noqa: PLR0917
    claim: Claim, computed: Tables, task: str, curvature: str, response: str, coefficient: str
) -> ClaimResult:
    """Judge the mean over seeds of the correlation of influence with one response, over test examples."""
    values = seed_values(computed, task, curvature, response, coefficient)
    why = f"{ways_text(computed, task, curvature, [response], coefficient)} {solved(computed, task, curvature)}"
    return over_seeds(claim, computed, task, curvature, values, f"{why}{_one_seed(values)}")


def judge_difference(  # noqa: PLR0917
    claim: Claim, computed: Tables, task: str, curvature: str, pair: tuple[str, str], coefficient: str
) -> ClaimResult:
    """Judge how much more influence correlates with the first response than with the second, seed by seed."""
    differences = difference(computed, task, curvature, pair, coefficient)
    others = [
        f"{WAY_NAMES[way]} {_mean_text(difference(computed, task, curvature, pair, coefficient, way))}"
        for way in WAYS[1:]
    ]
    why = (
        f"The difference {', '.join(others)}. {ways_text(computed, task, curvature, pair, coefficient)} "
        f"{solved(computed, task, curvature)}"
    )
    return over_seeds(claim, computed, task, curvature, differences, why, t_interval)


def over_seeds(  # noqa: PLR0917
    claim: Claim,
    computed: Tables,
    task: str,
    curvature: str,
    values: pd.Series,
    why: str,
    interval: Callable[[np.ndarray], Interval] = correlation_interval,
) -> ClaimResult:
    """Judge a mean over seeds with its interval, of fewer than three seeds none; `why` stands there in any case.

    Out of reach where influence was not solved. A bootstrap over points, which share one seed's drift, decides
    nothing.
    """
    found = values.to_numpy()
    result = judge(claim, float(found.mean()), interval(found), if_not_reproduced=why)
    residual = largest_residual(computed, task, curvature)
    if not residual <= MAX_RESIDUAL[curvature]:
        needed = f"needed: {MAX_RESIDUAL[curvature]:g}"
        reason = f"Influence was solved to a residual of {residual:.2g} only, {needed}. {why}"
        return replace(result, verdict=OUT_OF_REACH, explanation=reason)
    return replace(result, explanation=why) if result.verdict == REPRODUCED else result


def only_if(result: ClaimResult, condition: ClaimResult, reason: str) -> ClaimResult:
    """Return the result, out of reach unless the condition holds at least in direction."""
    if condition.verdict in (REPRODUCED, DIRECTION_ONLY) or result.verdict == OUT_OF_REACH:
        return result
    return replace(result, verdict=OUT_OF_REACH, explanation=f"{reason} {result.explanation}")


def difference(  # noqa: PLR0917
    computed: Tables, task: str, curvature: str, pair: tuple[str, str], coefficient: str, way: str = "over_test"
) -> pd.Series:
    """Return the correlation with the first response less that with the second, by seed."""
    first, second = (seed_values(computed, task, curvature, name, coefficient, way) for name in pair)
    return first - second


def seed_values(  # noqa: PLR0917
    computed: Tables, task: str, curvature: str, response: str, coefficient: str, way: str = "over_test"
) -> pd.Series:
    """Return one correlation, by seed."""
    table = computed["correlations"]
    chosen = table[
        (table.task == task)
        & (table.curvature == curvature)
        & (table.response == response)
        & (table.coefficient == coefficient)
        & (table.way == way)
    ]
    return chosen.set_index("seed").value.sort_index()


def ways_text(
    computed: Tables, task: str, curvature: str, responses: list[str] | tuple[str, ...], coefficient: str
) -> str:
    """Say what every way of correlating gives for some responses."""
    texts = []
    for response in responses:
        means = [seed_values(computed, task, curvature, response, coefficient, way).mean() for way in WAYS]
        given = ", ".join(f"{WAY_NAMES[way]} {mean:.2f}" for way, mean in zip(WAYS, means, strict=True))
        texts.append(f"{response.replace('_', ' ')} {given}")
    return f"{coefficient.capitalize()}: {'; '.join(texts)}."


def largest_residual(computed: Tables, task: str, curvature: str) -> float:
    """Return the largest relative residual of the influence solves of a task."""
    networks = computed["networks"]
    return float(networks[networks.task == task][f"{curvature} residual"].max(skipna=False))


def solved(computed: Tables, task: str, curvature: str) -> str:
    """Say how well influence was solved, and of the Hessian, what its matrix is."""
    networks = computed["networks"]
    own = networks[networks.task == task]
    text = f"Residual of the influence solve: at most {largest_residual(computed, task, curvature):.1g}."
    if curvature != "hessian" or "num_below" not in own or not np.isfinite(own.num_below).any():
        return text
    nearest = own.nearest.min()
    near = f", and min |μ + λ| is {nearest:.1g}" if np.isfinite(nearest) else ""
    return (
        f"{text} H + λI is at a saddle: {own.num_below.min():.0f} to {own.num_below.max():.0f} of {own.P.iloc[0]} "
        f"eigenvalues of H lie below -λ{near}: directions that no objective singles out dominate its inverse."
    )


def _mean_text(values: pd.Series) -> str:
    interval = t_interval(values.to_numpy())
    return (
        f"{values.mean():.2f} [{interval.low:.2f}, {interval.high:.2f}]"
        if len(values) > 1
        else f"{values.mean():.2f}"
    )


def _one_seed(values: pd.Series) -> str:
    return (
        " With one seed nothing is decided; the figure has the bootstrap over its points."
        if len(values) == 1
        else ""
    )
