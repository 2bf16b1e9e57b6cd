"""Trajectories of the methods on sqrt(1 + x²), their error of D, and their local rates."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab.lab import Run
from curvlab.optim import CubicNewton, UniformDirection, direction_estimate, unit_directions
from experiments.rank1.descent import descend
from experiments.rank1.objectives import Objective, square_root_curve

NAMED = {"newton": "Newton", "gradient": "gradient descent"}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each step of each run, and `summary`, one row for each run.

    Args:
        run: seeds.
        cfg: `starts` x_0, `deltas` δ, `num_steps`.
    """
    table = trajectories(cfg, run.generator("directions"))
    run.note(seeds=[cfg.seed])
    return {"table": table, "summary": summary(table)}


def trajectories(cfg: DictConfig, generator: torch.Generator) -> pd.DataFrame:
    """Return one row for each (method, delta, start, step): x, |f'|, f - f*, and the error of D against f''."""
    rows = []
    for start in cfg.starts:
        for delta in [*cfg.deltas, "newton", "gradient"]:
            objective = square_root_curve(start)
            optimizer = _optimizer(objective, delta, generator)
            trace = descend(objective, optimizer, num_steps=cfg.num_steps, stop_at=1e-14)
            label = NAMED.get(str(delta)) or f"δ = {float(delta):g}"
            for step, (x, norm, value) in enumerate(
                zip(trace.points, trace.gradient_norms, trace.values, strict=True)
            ):
                objective.parameters[0].data.fill_(x)
                rows.append(
                    {
                        "method": label,
                        "delta": delta if isinstance(delta, float | int) else None,
                        "start": start,
                        "step": step,
                        "x": x,
                        "gradient_norm": norm,
                        "gap": value - objective.optimum,
                        "error_of_D": _error_of_estimate(objective, generator),
                    }
                )
    return pd.DataFrame(rows)


def _optimizer(objective: Objective, delta: float | str, generator: torch.Generator) -> Optimizer:
    if delta == "newton":
        return CubicNewton(objective.parameters, objective.hessian)
    if delta == "gradient":
        return torch.optim.SGD(objective.parameters, lr=1 / objective.spectral_norm)  # type: ignore[operator]  # given
    return UniformDirection(
        objective.parameters,
        objective.hessian,
        delta=float(delta),
        sigma=float(delta),  # the Proposition for n = 1
        hessian_lipschitz=objective.hessian_lipschitz,
        generator=generator,
    )


def _error_of_estimate(objective: Objective, generator: torch.Generator) -> float:
    """Return |D - f''| / f'' for one draw."""
    exact = objective.hessian.to_dense()
    found = direction_estimate(objective.hessian, unit_directions(objective.hessian, 1, generator=generator))
    return float((found.to_dense() - exact).abs() / exact)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return steps to |f'| <= 1e-3 and 1e-8, the last |f'| and the local rate, for each method and start.

    From α_k follows for n = 1, with f''(x*) = 1: order 3/2 for δ = 0, and for δ > 0 a linear rate with factor
    2δ / (1 + 2δ), because δ enters twice, through D and through σ.
    """
    rows, name = [], square_root_curve(0.0).name
    for (method, start), own in table.groupby(["method", "start"], sort=False):
        row: dict[str, object] = {"objective": name, "method": method, "start": start}
        for epsilon in (1e-3, 1e-8):
            reached = own[own.gradient_norm <= epsilon].step
            row[f"steps to {epsilon:g}"] = int(reached.iloc[0]) if len(reached) else None
        row["diverged"] = bool(own.gradient_norm.isna().any())
        row["last |f'|"] = own.gradient_norm.iloc[-1]
        delta, norms = own.delta.iloc[0], own.gradient_norm.to_numpy()
        if delta == 0:
            row |= {"rate": "order", "measured rate": local_order(norms), "expected rate": 1.5}
        elif delta > 0:
            row |= {
                "rate": "factor",
                "measured rate": last_factor(norms),
                "expected rate": 2 * delta / (1 + 2 * delta),
            }
        rows.append(row)
    return pd.DataFrame(rows)


def local_order(norms: np.ndarray) -> float:
    """Return the slope of log |f'_{k+1}| on log |f'_k| below 1e-2; nan with fewer than two pairs."""
    pairs = [(a, b) for a, b in pairwise(norms) if b > 1e-12 and a < 1e-2]
    if len(pairs) < 2:
        return float("nan")
    x, y = np.log(np.array(pairs)).T
    return float(np.polyfit(x, y, 1)[0])


def last_factor(norms: np.ndarray) -> float:
    """Return the last contraction factor of |f'| above rounding."""
    above = norms[norms > 1e-10]
    return float(above[-1] / above[-2])
