"""Uniform directions on a 1-D function with f'' > 0 (Semenov 2025, first experiment).

make rank1-fig1 PRESET=smoke|embedded|laptop|paper ARGS="num_steps=100"

The slides do not name their function; here it is f(x) = sqrt(1 + x²), on which Newton's method diverges from
|x| > 1. For n = 1 the direction is u = 1 or -1, so D = f'' for every draw: nothing is random, and the method is
Newton's with the shift 2 δ + sqrt(M |f'| / 2) (δ counts twice: in D, and in σ = δ). Beside it gradient descent
with step 1/λ and Newton's method itself.
"""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, panels, plots
from curvlab.optim import direction_estimate, unit_directions
from experiments.rank1.descent import LEMMA, descend, make_optimizer
from experiments.rank1.objectives import Objective, square_root_curve
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Uniform directions on a 1-D function",
    paper={"summary.csv:objective": "1-D, f'' > 0, not named"}
    | dict.fromkeys(("starts", "deltas", "num_steps"), "not stated"),
    curves=("table: gap over step by method, delta, start",),
)
NAMED: dict[str, dict[str, float]] = {"Newton": {}, "gradient descent": {"lr_factor": 1.0}}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each step of each run, and `summary`, one row for each run.

    Reads `starts` x_0, `deltas` δ and `num_steps`.
    """
    generator, rows = run.generator("directions"), []
    for start in cfg.starts:
        for delta in [*cfg.deltas, *NAMED]:
            objective = square_root_curve(start)
            known = delta in NAMED
            # δ is also the Proposition's σ for n = 1; λ = 1.
            settings = NAMED[delta] if known else LEMMA | {"delta_scale": float(delta)}
            optimizer = make_optimizer(objective, delta if known else "uniform direction", settings, generator)
            trace = descend(objective, optimizer, num_steps=cfg.num_steps, stop_at=1e-14)
            label = delta if known else f"δ = {float(delta):g}"
            row = {"method": label, "delta": None if known else delta, "start": start}
            for step, x in enumerate(trace.points):
                objective.parameters[0].data.fill_(x)
                row |= {"step": step, "x": x, "gradient_norm": trace.gradient_norms[step]}
                row |= {"gap": trace.values[step] - objective.optimum}
                rows.append(row | {"error_of_D": _error_of_estimate(objective, generator)})
    table = pd.DataFrame(rows)
    run.note(seeds=[cfg.seed])
    return {"table": table, "summary": summary(table)}


def _error_of_estimate(objective: Objective, generator: torch.Generator) -> float:
    """Return |D - f''| / f'' for one draw."""
    exact = objective.hessian.to_dense()
    found = direction_estimate(objective.hessian, unit_directions(objective.hessian, 1, generator=generator))
    return float((found.to_dense() - exact).abs() / exact)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return steps to |f'| <= 1e-3 and 1e-8, the last |f'| and the local rate, for each method and start.

    From α_k follows for n = 1, with f''(x*) = 1: order 3/2 for δ = 0, and for δ > 0 a linear rate with factor
    2δ / (1 + 2δ), because δ enters twice, through D and through σ. The order is the slope of log |f'_{k+1}| on
    log |f'_k| below 1e-2, the factor the last one above rounding.
    """
    rows = []
    for (method, start), own in table.groupby(["method", "start"], sort=False):
        norms, delta = own.gradient_norm.to_numpy(), own.delta.iloc[0]
        row: dict[str, object] = {"objective": square_root_curve(0.0).name, "method": method, "start": start}
        for epsilon in (1e-3, 1e-8):
            reached = own.step[norms <= epsilon]
            row[f"steps to {epsilon:g}"] = int(reached.iloc[0]) if len(reached) else None
        row |= {"diverged": bool(own.gradient_norm.isna().any()), "last |f'|": norms[-1]}
        if delta == 0:
            near = (norms[1:] > 1e-12) & (norms[:-1] < 1e-2)
            order = stats.log_log_slope(norms[:-1][near], norms[1:][near])
            row |= {"rate": "order", "measured rate": order, "expected rate": 1.5}
        elif delta > 0:
            last = norms[norms > 1e-10][-2:]
            factor = {"measured rate": float(last[1] / last[0]), "expected rate": 2 * delta / (1 + 2 * delta)}
            row |= {"rate": "factor"} | factor
        rows.append(row)
    return pd.DataFrame(rows)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: |f'| from the nearest start, where all converge, and from the farthest."""
    table = computed["table"]
    shifted = table.method.str.startswith("δ")
    table = table.assign(method=table.method.where(~shifted, "lemma, " + table.method))
    styles = panels.styles_of(table.method.unique())
    for name in NAMED:
        styles[name]["linestyle"] = "--"
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 3.3), sharey=True)
    for ax, start in zip(axes[0], (table.start.min(), table.start.max()), strict=True):
        own = table[table.start == start].assign(size=lambda rows: rows.gradient_norm.clip(lower=1e-16))
        panels.lines(ax, own, x="step", y="size", by="method", styles=styles)
        ax.set(xlim=(-1, table.step.max()), ylim=(1e-15, 10))
        panels.frame(ax, x="step k", title=f"f(x) = sqrt(1 + x²) from x = {start:g}", log="y")
    axes[0, 0].set_ylabel("|f'(x_k)|")
    panels.legend(
        figure, columns=6, title="deterministic: one run each; δ: the shift of the lemma's estimate D of f''"
    )
    return {"figure.png": figure}
