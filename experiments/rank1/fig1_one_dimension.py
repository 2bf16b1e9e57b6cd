"""Uniform directions on a 1-D function with f'' > 0 (Semenov 2025, first experiment).

make rank1-fig1 PRESET=smoke|embedded|laptop|paper ARGS="num_steps=100"

The slides do not name their function; here it is f(x) = sqrt(1 + x²), on which Newton's method diverges from
|x| > 1. For n = 1 the direction is u = 1 or -1, so D = f'' for every draw: nothing is random, and the method is
Newton's with the shift 2 δ + sqrt(M |f'| / 2) (δ counts twice: in D, and in σ = δ). Beside it gradient descent
with step 1/λ and Newton's method itself.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab import runs
from curvlab.optim import CubicNewton, UniformDirection, direction_estimate, unit_directions
from curvlab.reporting import save_claims
from experiments.rank1.descent import descend
from experiments.rank1.fig1_claims import judge_claims
from experiments.rank1.fig1_plot import draw
from experiments.rank1.problems import Problem, square_root_curve

NAMED = {"newton": "Newton", "gradient": "gradient descent"}


@runs.main("rank1/fig1_one_dimension")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="fig1", title="Uniform directions on a 1-D function") as run:
        table = trajectories(cfg, run.generator("directions"))
        run.save_table(table)
        run.save_table(summary(table), "summary.csv")
        save_claims(run.folder, judge_claims(table))
        for name, figure in draw(table).items():
            run.save_figure(figure, name)
        run.note(
            scale={
                "function": {"ours": "sqrt(1 + x²)", "paper": "1D, f'' > 0, not named"},
                "starts": {"ours": list(cfg.starts), "paper": "not stated"},
                "δ": {"ours": list(cfg.deltas), "paper": "not stated"},
                "steps": {"ours": cfg.num_steps, "paper": "not stated"},
            },
            seeds=[cfg.seed],
        )


def trajectories(cfg: DictConfig, generator: torch.Generator) -> pd.DataFrame:
    """Return one row a (method, delta, start, step): x, |f'|, f - f*, and the error of D against f''."""
    rows = []
    for start in cfg.starts:
        for delta in [*cfg.deltas, "newton", "gradient"]:
            problem = square_root_curve(start)
            optimizer = _optimizer(problem, delta, generator)
            trace = descend(problem, optimizer, num_steps=cfg.num_steps, stop_at=1e-14)
            label = NAMED.get(str(delta)) or f"δ = {float(delta):g}"
            for step, (x, norm, value) in enumerate(
                zip(trace.points, trace.gradient_norms, trace.values, strict=True)
            ):
                problem.parameters[0].data.fill_(x)
                rows.append(
                    {
                        "method": label,
                        "delta": delta if isinstance(delta, float | int) else None,
                        "start": start,
                        "step": step,
                        "x": x,
                        "gradient_norm": norm,
                        "gap": value - problem.optimum,
                        "error_of_D": _error_of_estimate(problem, generator),
                    }
                )
    return pd.DataFrame(rows)


def _optimizer(problem: Problem, delta: float | str, generator: torch.Generator) -> Optimizer:
    if delta == "newton":
        return CubicNewton(problem.parameters, problem.hessian)
    if delta == "gradient":
        return torch.optim.SGD(problem.parameters, lr=1 / problem.spectral_norm)  # type: ignore[operator]  # given
    return UniformDirection(
        problem.parameters,
        problem.hessian,
        delta=float(delta),
        sigma=float(delta),  # the Proposition for n = 1
        hessian_lipschitz=problem.hessian_lipschitz,
        generator=generator,
    )


def _error_of_estimate(problem: Problem, generator: torch.Generator) -> float:
    """Return |D - f''| / f'' for one draw."""
    exact = problem.hessian.to_dense()
    found = direction_estimate(problem.hessian, unit_directions(problem.hessian, 1, generator=generator))
    return float((found.to_dense() - exact).abs() / exact)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return steps to |f'| <= 1e-3 and 1e-8, the last |f'| and the local rate, for each method and start.

    From α_k follows for n = 1, with f''(x*) = 1: order 3/2 for δ = 0, and for δ > 0 a linear rate with factor
    2δ / (1 + 2δ), because δ enters twice, through D and through σ.
    """
    rows = []
    for (method, start), own in table.groupby(["method", "start"], sort=False):
        row: dict[str, object] = {"method": method, "start": start}
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


if __name__ == "__main__":
    main()
