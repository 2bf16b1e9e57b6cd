"""Fig. 4, what the table says of each task: slope, C in the trace, and what the tokens of a sequence share."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each task the log-log slope of the left side, C in the trace, and what coherence costs.

    Least squares of log left on log |B|; its standard error from those of the values. C in the trace: left over
    right at C = 1, the mean over batch sizes. Coherence: left times |B| of sequences over that of single tokens;
    nan without them. All batch sizes count alike: few realizations carry most of a heavy-tailed mean, so that a
    low one has a small standard error too, and weights by it would pull the mean down.
    """
    rows = []
    for task, own in table.groupby("task", sort=False):
        ours = own[own.sampling == "examples"]
        error = (ours.left_stderr / ours.left).to_numpy()
        slope, stderr = _slope(np.log(ours.batch_size.to_numpy()), np.log(ours.left.to_numpy()), error)
        constant, relative = _mean((ours.left / ours.right).to_numpy(), error)
        # The trace of the right side is the same estimate for all batch sizes: its error does not average out.
        relative = math.hypot(relative, float((ours.right_stderr / ours.right).iloc[0]))
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


def _slope(x: np.ndarray, y: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    centred = x - x.mean()
    spread = (centred**2).sum()
    return float((centred * y).sum() / spread), float(np.sqrt((centred**2 * error**2).sum()) / spread)


def _mean(values: np.ndarray, relative: np.ndarray) -> tuple[float, float]:
    """Return the mean of independent values and its relative standard error."""
    error = float(np.sqrt(((values * relative) ** 2).sum())) / len(values)
    return float(values.mean()), error / float(values.mean())


def _coherence(own: pd.DataFrame, ours: pd.DataFrame) -> dict[str, float]:
    single = own[own.sampling == "single tokens"]
    if single.empty:
        return {"coherence": math.nan, "coherence_stderr": math.nan}
    error = (ours.left_stderr / ours.left).to_numpy()
    level, relative = _mean((ours.left * ours.batch_size).to_numpy(), error)
    value = level / float((single.left * single.batch_size).iloc[0])
    relative = math.hypot(relative, float((single.left_stderr / single.left).iloc[0]))
    return {"coherence": value, "coherence_stderr": value * relative}
