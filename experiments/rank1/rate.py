"""Steps to ‖∇f‖ <= ε against the lemma's K(ε) (Semenov 2025, uniform directions).

make rank1-rate PRESET=smoke|embedded|laptop|paper ARGS="max_steps=10000"

The method as in the lemma: S, one direction, δ = 0, α_k = sqrt(M ‖∇f‖ / 2) + λ sqrt(n (n - 1)), no safeguard. M
and λ are global constants in closed form, except for the networks in `tasks`, where both are the largest values on
the path, as measured by the optimizer. Eq. 3 is taken with log(‖∇f(x_0)‖ / ε); as printed, / 2, it is no bound:
the first objective is run a second time, multiplied by 1e-12, which changes no step.

The lemma says that f may be non-convex, and bounds D - H on average. Its proof needs D positive semi-definite
(or nearly, as for convex f): on the trapping curve, where it is not, the method cycles for ever. Not even
D + α_k I need be definite: `definiteness.csv` counts draws where it is not, for H = diag(cos x_i) near a maximum.
`growth` in summary.csv is the slope of log steps on log 1/ε; the bound's are 3/2 (σ = 0) and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.linalg import flatten
from curvlab.optim import UniformDirection, printed_steps_bound, stated_sigma, steps_bound
from experiments.rank1.descent import Trace, descend, steps_panel
from experiments.rank1.objectives import (
    Objective,
    cosines,
    logistic_regression,
    neural_network,
    quadratic,
    scaled,
    square_root_curve,
    trapping_curve,
)
from experiments.shared import stats
from experiments.shared.task import Task

TARGET = Target(
    __name__,
    title="Steps to ε against K(ε)",
    paper={"table.csv:objective": "any", "max_steps": "K(ε)", "max_steps_network": "K(ε)", "num_seeds": "none"},
)
SCALE = 1e-12  # of the objective that shows what Eq. 3 as printed is worth


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each (objective, seed, ε), `summary` and `definiteness`.

    Reads `logistic` (data, l2), `tasks` (networks), `epsilons` as multiples of ‖∇f(x_0)‖, `max_steps`,
    `max_steps_network`, `num_seeds`; `cosine_sizes` n and `num_draws` for `indefinite_draws`.
    """
    rows: list[dict[str, Any]] = []
    for key, (make, settings) in run.progress(list(objectives(run, cfg).items()), "objectives"):
        for seed in range(cfg.num_seeds):
            what = {"objective": key, "number": seed, "epsilons": list(cfg.epsilons)}
            rows += _steps(run, make, **what, **settings)["rows"]
    run.note(seeds=list(range(cfg.num_seeds)))
    table = pd.DataFrame(rows)
    definiteness = pd.DataFrame([indefinite_draws(run, size) for size in cfg.cosine_sizes])
    return {"table": table, "summary": summary(table), "definiteness": definiteness}


def objectives(run: Run, cfg: DictConfig) -> dict[str, tuple[Callable[[], Objective], dict[str, Any]]]:
    """Return makers of the objectives, each run starts from a new one, with what else their runs depend on."""
    splits, l2 = instantiate(cfg.logistic.data), cfg.logistic.l2
    run.record_data(splits.name, splits.checksum)
    steps = {"max_steps": cfg.max_steps}
    found: dict[str, tuple[Callable[[], Objective], dict[str, Any]]] = {
        "curve": (lambda: square_root_curve(3.0), steps),
        "curve, scaled": (lambda: scaled(square_root_curve(3.0), SCALE), steps),
        "isotropic": (lambda: quadratic("isotropic", 10, run.generator("quadratic")), steps),
        "power": (lambda: quadratic("power", 10, run.generator("quadratic")), steps),
        "logistic": (partial(logistic_regression, splits, l2=l2), steps | {"data": splits.checksum, "l2": l2}),
        "cosines": (lambda: cosines(5, 2.8), steps),
        "trapping": (lambda: trapping_curve(3.1), steps),
    }
    for task in Task.each(run, cfg):
        known = {"data": task.splits.checksum, "model": dict(task.settings.model)}
        found[task.label] = (partial(_network, task), {"max_steps": task.settings.max_steps_network} | known)
    return found


def _network(task: Task) -> Objective:
    model = task.build(task.run.generator("model"), dtype=torch.float64)
    return neural_network(model, task.pair(dtype=torch.float64), task.loss, name=task.label)


@unit("rank1/rate", version=1, about="{objective}, seed {number}")
def _steps(
    run: Run, make: Callable[[], Objective], /, *, objective: str, number: int, max_steps: int, **key: Any
) -> dict[str, Any]:
    function = make()
    known = function.spectral_norm
    optimizer = UniformDirection(
        function.parameters,
        function.hessian,
        sigma=None if known is None else stated_sigma(function.size, spectral_norm=known),
        hessian_lipschitz=function.hessian_lipschitz,
        safeguard=False,
        refresh_period=50,
        generator=run.generator("directions", number),
    )
    function.closure()
    first = float(flatten(p.grad for p in function.parameters if p.grad is not None).norm())
    epsilons = [ratio * first for ratio in key["epsilons"]]
    trace = descend(function, optimizer, num_steps=max_steps, stop_at=min(epsilons))
    run.add_matvecs(trace.num_products[-1])
    names = {"key": objective, "objective": function.name, "n": function.size, "seed": number}
    return {"rows": [names | _row(function, trace, epsilon) for epsilon in epsilons]}


def _row(objective: Objective, trace: Trace, epsilon: float) -> dict[str, Any]:
    """Return measured steps beside the bound at one ε."""
    spectral_norm, lipschitz = objective.spectral_norm, objective.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        spectral_norm, lipschitz = trace.directions[-1].spectral_norm, trace.directions[-1].hessian_lipschitz
    # The lemma counts k >= 1; the gap to the best value seen is a harder test than the gap to f*.
    best = objective.optimum if objective.optimum > 0 else min(objective.optimum, *trace.values)
    constants = {
        "gap": trace.values[0] - best,
        "gradient_norm": trace.gradient_norms[0],
        "hessian_lipschitz": lipschitz,
        "sigma": stated_sigma(objective.size, spectral_norm=spectral_norm),
    }
    return {
        "epsilon": epsilon,
        "relative_epsilon": epsilon / trace.gradient_norms[0],
        "steps": trace.steps_to(epsilon),
        "steps_taken": len(trace.values) - 1,
        "bound": steps_bound(epsilon, **constants),
        "printed_bound": printed_steps_bound(epsilon, **constants),
        **constants,
        **trace.shares(spectral_norm),
        "diverged": trace.diverged,
    }


def indefinite_draws(run: Run, size: int) -> dict[str, Any]:
    """Return the shares of draws at one point of Σ (1 - cos x_i) near its maximum for which the lemma fails."""
    num_draws, generator, infos = run.cfg.num_draws, run.generator("definiteness", size), []
    for _ in range(num_draws):
        objective = cosines(size, 3.0)
        optimizer = UniformDirection(
            objective.parameters,
            objective.hessian,
            sigma=stated_sigma(size, spectral_norm=1.0),
            hessian_lipschitz=1.0,
            safeguard=False,
            generator=generator,
        )
        optimizer.step(objective.closure)
        if optimizer.last_step is None:
            raise RuntimeError("a step was taken, but not recorded")
        infos.append(optimizer.last_step)
    alpha, gradient_norm = infos[-1].alpha, infos[-1].gradient_norm  # those of the point: the same for all draws
    return {
        "n": size,
        "draws": num_draws,
        "gradient_norm": gradient_norm,
        "alpha": alpha,
        "share_not_definite": sum(info.smallest_eigenvalue + info.shift <= 0 for info in infos) / num_draws,
        "share_uphill": sum(info.slope > 0 for info in infos) / num_draws,
        "longest_step_by_alpha": max(info.step_norm for info in infos) * alpha / gradient_norm,
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each (objective, ε): steps (median over the seeds that reached it) and K(ε).

    `growth`: slope of log steps on log 1/ε of the objective, largest over seeds with three ε reached; the shares
    are over steps.
    """
    found = table.groupby(["objective", "relative_epsilon"], sort=False).agg(
        n=("n", "first"),
        steps=("steps", "median"),
        reached=("steps", "count"),
        seeds=("seed", "nunique"),
        bound=("bound", "median"),
        printed_bound=("printed_bound", "median"),
        share_indefinite=("share_indefinite", "mean"),
        share_singular=("share_singular", "mean"),
        share_rising=("share_rising", "mean"),
    )
    growth = {
        name: max(stats.log_log_slope(1 / run.epsilon, run.steps, least=3) for _, run in own.groupby("seed"))
        for name, own in table.groupby("objective")
    }
    found = found.reset_index()
    return found.assign(growth=found.objective.map(growth))


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the steps over the bound, all objectives in one panel, and a panel for each."""
    table = computed["table"]
    table = table[table.key != "curve, scaled"]
    never = table.groupby("objective").steps.transform("count") == 0
    shown = table.assign(
        share=table.steps / table.bound,
        inverse=1 / table.relative_epsilon,
        function=table.objective.str.replace("_", " "),
    )
    figure, axes = plots.figure(panel_size=(8.0, 3.8))
    panels.lines(axes[0, 0], shown[~never], x="inverse", y="share", by="function")
    panels.rule(axes[0, 0], y=1, label="the bound K(ε) of the lemma", color="black")
    for function, own in shown[never & (table.steps_taken > table.bound)].groupby(
        "function"
    ):  # more than the bound
        label = f"{function}: never arrives, here after {own.steps_taken.min():,} steps"
        look = {"linestyle": "none", "color": "black", "markersize": 9}
        axes[0, 0].plot(own.inverse, own.steps_taken / own.bound, marker="$\u2191$", label=label, **look)
    panels.frame(axes[0, 0], x="‖∇f(x_0)‖ / ε", y="steps to ε over K(ε)", log="xy")
    number = panels.seeds(table.groupby("objective").seed.nunique())
    panels.legend(figure, columns=3, title=f"mean over those of {number} that arrived, band: 95 % t interval")
    groups = list(table.groupby("objective", sort=False))
    more, axes = plots.figure(2, -(-len(groups) // 2), panel_size=(2.6, 2.7))
    for ax, (objective, own) in zip(axes.flat, groups, strict=False):
        steps_panel(ax, own)
        panels.frame(ax, title=str(objective).replace(", n", "\nn").replace("_", " "), size=9)
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    for ax in axes.flat[len(groups) :]:
        ax.set_axis_off()
    panels.legend(more)
    return {"figure.png": figure, "figure_more.png": more}
