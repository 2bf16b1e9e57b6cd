"""What tab6 to tab8 judge: how influence correlates with each response, over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Interval, judge, t_interval
from experiments.target import Computed


def judge_correlation(  # noqa: PLR0917
    claim: Claim, computed: Computed, task: str, curvature: str, response: str, coefficient: str
) -> ClaimResult:
    """Judge the correlation of influence with one response; see `over_seeds`."""
    values = over_test(computed, task, curvature, response, coefficient)
    return over_seeds(claim, values, f"{_others(computed, task, curvature, response, coefficient)}")


def judge_difference(  # noqa: PLR0917
    claim: Claim, computed: Computed, task: str, curvature: str, pair: tuple[str, str], coefficient: str
) -> ClaimResult:
    """Judge how much more influence correlates with the first response than with the second, seed by seed."""
    first, second = (over_test(computed, task, curvature, response, coefficient) for response in pair)
    why = f"{pair[0]}: {first.value.mean():.2f}, {pair[1]}: {second.value.mean():.2f} (means over seeds)."
    difference = first.assign(value=first.value.to_numpy() - second.value.to_numpy())
    return over_seeds(claim, difference.drop(columns=["low", "high"]), why)


def over_seeds(claim: Claim, values: pd.DataFrame, why: str) -> ClaimResult:
    """Judge the mean over seeds, with a t interval; with one seed, that of the bootstrap over its points."""
    found = values.value.to_numpy()
    interval = t_interval(found)
    if len(found) == 1 and "low" in values and np.isfinite(values.low.iloc[0]):
        row = values.iloc[0]
        interval = Interval(row.low, row.high, f"bootstrap 95 %, {row.points:.0f} points, 1 seed", int(row.points))
    return judge(claim, float(found.mean()), interval, if_not_reproduced=why)


def over_test(computed: Computed, task: str, curvature: str, response: str, coefficient: str) -> pd.DataFrame:
    """Return the rows of one correlation over test examples, one for each seed."""
    table = computed["correlations"]
    chosen = table[
        (table.task == task)
        & (table.curvature == curvature)
        & (table.response == response)
        & (table.coefficient == coefficient)
        & (table.way == "over_test")
    ]
    return chosen.sort_values("seed")


def _others(computed: Computed, task: str, curvature: str, response: str, coefficient: str) -> str:
    """Say what the other ways of correlating give."""
    table = computed["table"]
    linearised = over_test(computed, task, curvature, "linearised", coefficient).value
    solved = f" With the linearised PBRF by SGD: {linearised.mean():.2f}." if len(linearised) else ""
    row = table[(table.task == task) & (table.curvature == curvature) & (table.response == response)].iloc[0]
    return (
        f"Over the points, for each test example: {row[f'{coefficient} over_points']:.2f}; over all pairs: "
        f"{row[f'{coefficient} pooled']:.2f}.{solved}"
    )
