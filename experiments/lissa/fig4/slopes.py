"""Fig. 4, what the table says of each task: slope, C in the trace, and what the tokens of a sequence share."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each task the log-log slope of the left side, C in the trace, and what coherence costs.

    Least squares of log left on log |B|, weighted by the standard errors, which give that of the slope. C in the
    trace: left over right at C = 1, the weighted mean over batch sizes. Coherence: left times |B| of sequences
    over that of single tokens; nan without them.
    """
    rows = []
    for task, own in table.groupby("task", sort=False):
        ours = own[own.sampling == "examples"]
        error = (ours.left_stderr / ours.left).to_numpy()
        slope, stderr = _weighted_slope(np.log(ours.batch_size.to_numpy()), np.log(ours.left.to_numpy()), error)
        ratio, weight = (ours.left / ours.right).to_numpy(), 1 / error**2
        constant = float((ratio * weight).sum() / weight.sum())
        # The trace of the right side is the same estimate for all batch sizes: its error does not average out.
        relative = math.hypot(float(1 / math.sqrt(weight.sum())), float((ours.right_stderr / ours.right).iloc[0]))
        rows.append(
            {
                "task": task,
                "slope": slope,
                "slope_stderr": stderr,
                "constant": constant,
                "constant_stderr": constant * relative,
                **_coherence(own, ours),
            }
        )
    return pd.DataFrame(rows)


def _weighted_slope(x: np.ndarray, y: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    weight = 1 / error**2
    centred = x - (weight * x).sum() / weight.sum()
    spread = (weight * centred**2).sum()
    return float((weight * centred * y).sum() / spread), float(1 / math.sqrt(spread))


def _coherence(own: pd.DataFrame, ours: pd.DataFrame) -> dict[str, float]:
    single = own[own.sampling == "single tokens"]
    if single.empty:
        return {"coherence": math.nan, "coherence_stderr": math.nan}
    levels, error = (ours.left * ours.batch_size).to_numpy(), (ours.left_stderr / ours.left).to_numpy()
    weight = 1 / error**2
    level = float((levels * weight).sum() / weight.sum())
    value = level / float((single.left * single.batch_size).iloc[0])
    relative = math.hypot(1 / math.sqrt(weight.sum()), float((single.left_stderr / single.left).iloc[0]))
    return {"coherence": value, "coherence_stderr": value * relative}
