"""What curves of error against cost come to: their ends, what they cost to a tolerance, and all at equal cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from curvlab.lab import Interval, t_interval
from experiments.shared.stats import in_columns

KEYS = ["task", "curvature", "method"]
CORRELATION, ERROR = 0.9, 0.1  # the tolerances whose cost is listed, and judged


def cost_to(curve: pd.DataFrame, quantity: str) -> float:
    """Return the work from which on every iterate has an error of at most 0.1, or a correlation of at least 0.9.

    nan if the last one has not. That an earlier iterate got there and fell back does not count: who stops at a
    given cost does not know which iterate he has.
    """
    reached = curve.error <= ERROR if quantity == "error" else curve.correlation >= CORRELATION
    stays = reached[::-1].cummin()[::-1]
    return float(curve.work[stays].min())


def at_cost(curve: pd.DataFrame, cost: float, quantity: str) -> float:
    """Return the quantity of the last iterate with at most this work; nan before the first one."""
    done = curve[curve.work <= cost * (1 + 1e-9)]
    return float(done[quantity].iloc[-1]) if len(done) else float("nan")


def geometric(values: np.ndarray) -> tuple[float, Interval]:
    """Return the geometric mean of positive values over seeds, with a t interval of the logarithm."""
    logs = np.log(values)
    return float(np.exp(np.mean(logs))), t_interval(logs).mapped(math.exp, ", of the logarithm")


def ends(curves: pd.DataFrame, states: pd.DataFrame, solvers: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, curvature and method: means over seeds, with intervals of the end of a curve.

    Columns: what was solved, with which settings; at the end of the curve work, error and correlation with 95 %
    intervals over seeds (errors by geometric mean); and the work from which on the correlation stays at 0.9
    or above and the error at 0.1 or below, with the number of seeds that get there.
    """
    rows: list[dict[str, Any]] = []
    for names, own in curves.groupby(KEYS, sort=False):
        task, curvature, method = names
        state = states[(states.task == task) & (states.curvature == curvature)]
        chosen = solvers[(solvers.task == task) & (solvers.curvature == curvature) & (solvers.method == method)]
        last = own.groupby("seed").tail(1)
        row = dict(zip(KEYS, names, strict=True)) | {
            "P": state.P.iloc[0],
            "N": state.N.iloc[0],
            "damping": state.damping.mean(),
            "largest eigenvalue": state["largest eigenvalue"].mean(),
            "reference residual": state["reference residual"].max(),
            "seeds": own.seed.nunique(),
            "batch_size": _mean(chosen, "batch_size"),
            "num_steps": _mean(chosen, "num_steps"),
            "scale": _mean(chosen, "scale"),
            "work": last.work.mean(),
            **_error(last.error.to_numpy()),
            **in_columns("correlation", last.correlation, joint=" "),
        }
        for quantity, tolerance in (("correlation", CORRELATION), ("error", ERROR)):
            costs = np.array([cost_to(curve, quantity) for _, curve in own.groupby("seed")])
            reached = np.isfinite(costs)
            row[f"work to {quantity} {tolerance}"] = costs[reached].mean() if reached.any() else np.nan
            row[f"seeds that reach {quantity} {tolerance}"] = int(reached.sum())
        rows.append(row)
    return pd.DataFrame(rows)


def at_equal_cost(curves: pd.DataFrame, costs: list[float]) -> pd.DataFrame:
    """Return one row for each task, curvature, cost and method that has an iterate by then in every seed.

    Columns: error (geometric mean over seeds) and correlation (mean), with 95 % intervals.
    """
    rows: list[dict[str, Any]] = []
    for names, own in curves.groupby(KEYS, sort=False):
        for cost in costs:
            by_seed = [curve for _, curve in own.groupby("seed")]
            errors = np.array([at_cost(curve, cost, "error") for curve in by_seed])
            correlations = np.array([at_cost(curve, cost, "correlation") for curve in by_seed])
            if not np.isfinite(errors).all():
                continue
            row = dict(zip(KEYS, names, strict=True)) | {"cost": cost, "seeds": len(by_seed)}
            rows.append(row | _error(errors) | in_columns("correlation", correlations, joint=" "))
    return pd.DataFrame(rows).sort_values(["task", "curvature", "cost"], kind="stable")


def _error(errors: np.ndarray) -> dict[str, float]:
    mean, interval = geometric(errors)
    return {"error": mean, "error low": interval.low, "error high": interval.high}


def _mean(chosen: pd.DataFrame, name: str) -> float:
    return float(chosen[name].mean()) if name in chosen else float("nan")
