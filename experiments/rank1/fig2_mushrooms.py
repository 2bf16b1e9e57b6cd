"""Uniform directions on logistic regression (Semenov 2025, the experiments on mushrooms, 112 x 112).

make rank1-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=mushrooms l2=1e-4"

Gradient norm and f - f* from x = 0 for: α_k of the lemma, with σ times 1 (the Proposition), 0.1, ..., 0; shifts δ;
S or D, with and without safeguard; means over several directions; beside gradient descent, Newton's method and
cubic Newton. The slides show four such plots without their settings in the text, and no number. M and λ are global
constants in closed form (λ = λmax(AᵀA/N)/4 + l2); l2 makes the minimum unique (mushrooms can be separated).

table.csv holds the curves at about 60 steps each, timing.csv the seconds a step, which no repetition reproduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab import runs
from curvlab.optim import CubicNewton, UniformDirection, stated_sigma
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.rank1.descent import Trace, current_point, descend, restart
from experiments.rank1.fig2_claims import judge_claims
from experiments.rank1.fig2_plot import draw
from experiments.rank1.problems import Problem, logistic_regression

NUM_RECORDED = 60
# What a variant is when it does not say otherwise: the lemma as it stands.
LEMMA: dict[str, Any] = {
    "sigma_scale": 1.0,
    "delta_scale": 0.0,
    "num_directions": 1,
    "symmetrize": True,
    "safeguard": False,
}


@runs.main("rank1/fig2_mushrooms")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="fig2", title="Uniform directions on logistic regression") as run:
        splits = instantiate(cfg.data)
        run.record_data(splits.name, splits.checksum)
        problem = logistic_regression(splits, l2=cfg.l2)
        rows, timings = [], []
        for method, settings in variants(cfg):
            seeds = range(cfg.num_seeds) if method == "uniform direction" else range(1)
            for seed in seeds:
                stored = _unit(run, problem, (method, settings), seed)
                rows += [{**label(method, settings), "seed": seed, **row} for row in stored["rows"]]
                timings.append({**label(method, settings), "seed": seed, "seconds_per_step": stored["seconds"]})
        table, timing = pd.DataFrame(rows), pd.DataFrame(timings)
        run.save_table(table)
        run.save_table(timing, "timing.csv")
        run.save_table(summary(table), "summary.csv")
        save_claims(run.folder, judge_claims(table))
        for name, figure in draw(table, timing).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(cfg, problem), seeds=list(range(cfg.num_seeds)))


def variants(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (method, settings), each once."""
    seen: list[dict[str, Any]] = []
    for change in [
        *({"sigma_scale": scale} for scale in cfg.sigma_scales),
        *({"sigma_scale": 0.0, "delta_scale": scale} for scale in cfg.delta_scales),
        *(
            {"sigma_scale": scale, "symmetrize": symmetrize, "safeguard": safeguard}
            for scale in cfg.form_scales
            for symmetrize in (True, False)
            for safeguard in (True, False)
        ),
        *(
            {"sigma_scale": scale, "num_directions": count, "safeguard": scale < 1}
            for scale in (1.0, cfg.directions_scale)
            for count in cfg.directions
        ),
    ]:
        settings = {**LEMMA, **change}
        if settings not in seen:
            seen.append(settings)
            yield "uniform direction", settings
    for factor in cfg.lr_factors:
        yield "gradient descent", {"lr_factor": float(factor)}
    yield "Newton", {}
    yield "cubic Newton", {}


def label(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that name a variant; empty where a setting does not apply."""
    names = [*LEMMA, "lr_factor"]
    return {"method": method, **{name: settings.get(name) for name in names}}


def _unit(run: Run, problem: Problem, variant: tuple[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    (method, settings), cfg = variant, run.cfg

    def compute() -> dict[str, Any]:
        start = current_point(problem)
        optimizer = make_optimizer(problem, method, settings, run.generator("directions", seed))
        trace = descend(problem, optimizer, num_steps=cfg.num_steps, stop_at=1e-12)
        restart(problem, start)
        run.add_matvecs(trace.num_products[-1])
        return {"rows": recorded(trace, problem.optimum), "seconds": trace.seconds_per_step}

    config = {
        "problem": problem.name,
        "l2": cfg.l2,
        "rows": [cfg.data.num_train, cfg.data.num_test],
        "method": method,
        "settings": settings,
        "num_steps": cfg.num_steps,
        "number": seed,
        "version": 1,
    }
    return run.unit("rank1/fig2", config, compute)


def make_optimizer(
    problem: Problem, method: str, settings: dict[str, Any], generator: torch.Generator
) -> Optimizer:
    """Return the optimizer of a variant, with the problem's global constants."""
    spectral_norm, lipschitz = problem.spectral_norm, problem.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        raise ValueError(f"{problem.name} has no known λ and M")
    if method == "gradient descent":
        return torch.optim.SGD(problem.parameters, lr=settings["lr_factor"] / spectral_norm)
    if method == "Newton":
        return CubicNewton(problem.parameters, problem.hessian)
    if method == "cubic Newton":
        return CubicNewton(problem.parameters, problem.hessian, hessian_lipschitz=lipschitz)
    delta, count = settings["delta_scale"] * spectral_norm, settings["num_directions"]
    sigma = stated_sigma(problem.size, spectral_norm=spectral_norm, delta=delta, num_directions=count)
    return UniformDirection(
        problem.parameters,
        problem.hessian,
        delta=delta,
        num_directions=count,
        symmetrize=settings["symmetrize"],
        sigma=settings["sigma_scale"] * sigma,
        hessian_lipschitz=lipschitz,
        safeguard=settings["safeguard"],
        generator=generator,
    )


def recorded(trace: Trace, optimum: float) -> list[dict[str, Any]]:
    """Return rows at steps about evenly spaced on a log scale; the last has the shares over all steps."""
    last = len(trace.values) - 1
    steps = np.unique(np.geomspace(1, max(last, 1), NUM_RECORDED).round().astype(int))
    rows: list[dict[str, Any]] = [
        {
            "step": int(step),
            "products": trace.num_products[step],
            "passes": int(step) + trace.num_products[step],
            "gradient_norm": trace.gradient_norms[step],
            "gap": trace.values[step] - optimum,
        }
        for step in [0, *steps]
        if step <= last
    ]
    values = np.array(trace.values)
    rows[-1] |= {
        "share_rising": float((np.diff(values) > 1e-14).mean()) if last else 0.0,
        "share_uphill": float(np.mean(np.array(trace.slopes) > 0)) if trace.slopes else None,
        "share_indefinite": float(np.mean(np.array(trace.smallest) < -1e-12)) if trace.smallest else None,
        "share_singular": _share_singular(trace),
        "diverged": trace.diverged,
    }
    return rows


def _share_singular(trace: Trace) -> float | None:
    """Return the share of steps whose symmetric part of D + shift I is not positive definite."""
    if not trace.smallest:
        return None
    return float(np.mean(np.array(trace.smallest) + np.array(trace.shifts) <= 0))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a variant: where it ended (median over seeds), and how it behaved on the way."""
    columns = ["method", *LEMMA, "lr_factor"]
    last = table.sort_values("step").groupby([*columns, "seed"], sort=False, dropna=False).tail(1)
    found = last.groupby(columns, sort=False, dropna=False).agg(
        seeds=("seed", "nunique"),
        steps=("step", "max"),
        passes=("passes", "median"),
        last_gradient_norm=("gradient_norm", "median"),
        last_gap=("gap", "median"),
        share_rising=("share_rising", "mean"),
        share_uphill=("share_uphill", "mean"),
        share_indefinite=("share_indefinite", "mean"),
        share_singular=("share_singular", "mean"),
        diverged=("diverged", "sum"),
    )
    return found.reset_index().sort_values("last_gradient_norm")


def _scale(cfg: DictConfig, problem: Problem) -> dict[str, Any]:
    return {
        "problem": {"ours": problem.name, "paper": "mushrooms, n = 112"},
        "regularisation": {"ours": cfg.l2, "paper": "not stated"},
        "steps": {"ours": cfg.num_steps, "paper": "not stated"},
        "seeds": {"ours": cfg.num_seeds, "paper": "not stated"},
        "tuning grid of σ, as multiples of the Proposition's": {
            "ours": list(cfg.sigma_scales),
            "paper": "not stated",
        },
        "tuning grid of gradient descent, as multiples of 1/λ": {
            "ours": list(cfg.lr_factors),
            "paper": "not stated",
        },
    }


if __name__ == "__main__":
    main()
