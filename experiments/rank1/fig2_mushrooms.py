"""Uniform directions on logistic regression (Semenov 2025, the experiments on mushrooms, 112 x 112).

make rank1-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=mushrooms l2=1e-4"

Gradient norm and f - f* from x = 0 for: α_k of the lemma, with σ times 1 (the Proposition), 0.1, ..., 0; other
rules for α_k; shifts δ; S or D, with and without safeguard; means over several directions; beside gradient
descent, Newton's method and cubic Newton. The slides show four such plots without their settings in the text,
and no number. M and λ are global constants in closed form (λ = λmax(AᵀA/N)/4 + l2), but for the rule that measures
them; l2 makes the minimum unique (mushrooms can be separated).

With one direction and given constants a step costs one Hessian product. table.csv holds the curves at about 60
steps each; further.csv a longer run of the lemma's own variant; timing.csv and cost.csv seconds, which no
repetition reproduces.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig

from curvlab import runs
from curvlab.optim import stated_sigma, steps_bound
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.rank1.descent import Trace, current_point, descend, restart
from experiments.rank1.fig2_claims import REACHED, judge_claims
from experiments.rank1.fig2_cost import cost_rows
from experiments.rank1.fig2_plot import draw
from experiments.rank1.fig2_variants import LEMMA, label, make_optimizer, summary, variants
from experiments.rank1.problems import Problem, logistic_regression

NUM_RECORDED = 60


@runs.main("rank1/fig2_mushrooms")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="fig2", title="Uniform directions on logistic regression") as run:
        splits = instantiate(cfg.data)
        run.record_data(splits.name, splits.checksum)
        problem = logistic_regression(splits, l2=cfg.l2)
        rows, timings = [], []
        for method, settings in run.progress(list(variants(cfg)), "variants"):
            seeds = range(cfg.num_seeds) if method == "uniform direction" else range(1)
            for seed in seeds:
                stored = _unit(run, problem, splits.checksum, (method, settings), seed)
                rows += [{**label(method, settings), "seed": seed, **row} for row in stored["rows"]]
                timings.append({**label(method, settings), "seed": seed, "seconds_per_step": stored["seconds"]})
        tables = {
            "table.csv": pd.DataFrame(rows),
            "timing.csv": pd.DataFrame(timings),
            "cost.csv": pd.DataFrame(cost_rows(run, cfg)),
        }
        further = _further(run, problem, splits.checksum)
        for name, table in tables.items():
            run.save_table(table, name)
        run.save_table(pd.DataFrame([further]), "further.csv")
        run.save_table(summary(tables["table.csv"]), "summary.csv")
        save_claims(run.folder, judge_claims(tables["table.csv"], further))
        for name, figure in draw(*tables.values()).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(cfg, problem), seeds=list(range(cfg.num_seeds)))


def _unit(
    run: Run, problem: Problem, checksum: str, variant: tuple[str, dict[str, Any]], seed: int
) -> dict[str, Any]:
    (method, settings), cfg = variant, run.cfg

    def compute() -> dict[str, Any]:
        start = current_point(problem)
        optimizer = make_optimizer(problem, method, settings, run.generator("directions", seed))
        trace = descend(problem, optimizer, num_steps=cfg.num_steps, stop_at=1e-12)
        restart(problem, start)
        run.add_matvecs(trace.num_products[-1])
        rows = recorded(trace, problem.optimum)
        if settings.get("rule") == "given":  # the optimizer is given σ and knows no λ
            rows = [{**row, "spectral_norm": problem.spectral_norm} for row in rows]
        return {"rows": rows, "seconds": trace.seconds_per_step}

    config = {
        "data": checksum,
        "l2": cfg.l2,
        "method": method,
        "settings": settings,
        "num_steps": cfg.num_steps,
        "number": seed,
        "version": 2,
    }
    return run.unit("rank1/fig2", config, compute)


def _further(run: Run, problem: Problem, checksum: str) -> dict[str, Any]:
    """Return when the lemma's variant, first seed, reaches the tolerance of its claim, given many more steps."""
    cfg = run.cfg

    def compute() -> dict[str, Any]:
        start = current_point(problem)
        first = float(problem.closure().detach())
        norm = float(problem.parameters[0].grad.norm())  # type: ignore[union-attr]  # left by the closure
        optimizer = make_optimizer(problem, "uniform direction", LEMMA, run.generator("directions", 0))
        trace = descend(problem, optimizer, num_steps=cfg.further_steps, stop_at=REACHED * norm)
        restart(problem, start)
        run.add_matvecs(trace.num_products[-1])
        spectral_norm, lipschitz = problem.spectral_norm or 0.0, problem.hessian_lipschitz or 0.0
        return {
            "relative_epsilon": REACHED,
            "steps": len(trace.values) - 1,
            "reached": trace.gradient_norms[-1] <= REACHED * norm,
            "gradient_norm_ratio": trace.gradient_norms[-1] / norm,
            "bound": steps_bound(
                REACHED * norm,
                gap=first - problem.optimum,
                gradient_norm=norm,
                hessian_lipschitz=lipschitz,
                sigma=stated_sigma(problem.size, spectral_norm=spectral_norm),
            ),
        }

    config = {"data": checksum, "l2": cfg.l2, "num_steps": cfg.further_steps, "ratio": REACHED, "version": 1}
    return run.unit("rank1/fig2-further", config, compute)


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
            "alpha": _of_step(trace.alphas, step),
            "spectral_norm": _of_step(trace.spectral_norms, step),
            "hessian_lipschitz": _of_step(trace.lipschitz_constants, step),
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


def _of_step(values: list[float], step: int) -> float | None:
    """Return what step k used; at the last point, from which no step was taken, what the last step used."""
    if not values:
        return None
    value = values[min(step, len(values) - 1)]
    return None if math.isnan(value) else value


def _share_singular(trace: Trace) -> float | None:
    """Return the share of steps whose symmetric part of D + shift I is not positive definite."""
    if not trace.smallest:
        return None
    return float(np.mean(np.array(trace.smallest) + np.array(trace.shifts) <= 0))


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
        "rules for α_k": {"ours": ["given", "measured", "constant"], "paper": "given; how is not stated"},
        "tuning grid of gradient descent, as multiples of 1/λ": {
            "ours": list(cfg.lr_factors),
            "paper": "not stated",
        },
    }


if __name__ == "__main__":
    main()
