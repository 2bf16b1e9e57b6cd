"""Curves of all variants, a longer run of the lemma's own, and seconds of a step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig

from curvlab.lab import Run
from curvlab.lab.data import DataSplits
from curvlab.optim import stated_sigma, steps_bound
from experiments.rank1.descent import Trace, descend
from experiments.rank1.fig2.cost import cost_rows
from experiments.rank1.fig2.variants import LEMMA, REACHED, label, make_optimizer, summary, variants
from experiments.rank1.objectives import Objective, logistic_regression

NUM_RECORDED = 60


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table` (curves), `summary` (one row for each variant), `further`, `timing` and `cost`.

    Args:
        run: seeds, store.
        cfg: `data`, `l2`, `num_steps`, `num_seeds`, `further_steps`, and what `variants` and `cost_rows` read.
    """
    splits: DataSplits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    objective = logistic_regression(splits, l2=cfg.l2)
    data = {"data": splits.checksum, "l2": cfg.l2}
    rows, timings = [], []
    for method, settings in run.progress(list(variants(cfg)), "variants"):
        for seed in range(cfg.num_seeds if method == "uniform direction" else 1):
            config = {**data, "method": method, "settings": settings, "num_steps": cfg.num_steps, "number": seed}
            curve = partial(_curve, run, objective, (method, settings), seed)
            shown = ", ".join(f"{key} {value}" for key, value in settings.items())
            about = f"{method} ({shown}), seed {seed}"
            stored = run.unit("rank1/logistic", config, curve, version=1, about=about)
            rows += [{**label(method, settings), "seed": seed, **row} for row in stored["rows"]]
            timings.append({**label(method, settings), "seed": seed, "seconds_per_step": stored["seconds"]})
    further = []
    for seed in range(cfg.num_seeds):
        config = {**data, "num_steps": cfg.further_steps, "ratio": REACHED, "number": seed}
        longer = partial(_further, run, objective, seed)
        about = f"{cfg.further_steps} steps further, seed {seed}"
        found = run.unit("rank1/logistic-further", config, longer, version=2, about=about)
        further.append({"objective": objective.name, "seed": seed, **found})
    run.note(seeds=list(range(cfg.num_seeds)))
    table = pd.DataFrame(rows)
    return {
        "table": table,
        "summary": summary(table),
        "further": pd.DataFrame(further),
        "timing": pd.DataFrame(timings),
        "cost": pd.DataFrame(cost_rows(run, cfg)),
    }


def _curve(run: Run, objective: Objective, variant: tuple[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    (method, settings), start = variant, objective.point()
    optimizer = make_optimizer(objective, method, settings, run.generator("directions", seed))
    trace = descend(objective, optimizer, num_steps=run.cfg.num_steps, stop_at=1e-12)
    objective.move_to(start)
    run.add_matvecs(trace.num_products[-1])
    rows = recorded(trace, objective)
    if settings.get("rule") == "given":  # the optimizer is given σ and knows no λ
        rows = [{**row, "spectral_norm": objective.spectral_norm} for row in rows]
    return {"rows": rows, "seconds": trace.seconds_per_step}


def _further(run: Run, objective: Objective, seed: int) -> dict[str, Any]:
    """Return when the lemma's variant reaches the tolerance of its claim, given many more steps."""
    start = objective.point()
    first = float(objective.closure().detach())
    norm = float(objective.parameters[0].grad.norm())  # type: ignore[union-attr]  # left by the closure
    optimizer = make_optimizer(objective, "uniform direction", LEMMA, run.generator("directions", seed))
    trace = descend(objective, optimizer, num_steps=run.cfg.further_steps, stop_at=REACHED * norm)
    objective.move_to(start)
    run.add_matvecs(trace.num_products[-1])
    return {
        "relative_epsilon": REACHED,
        "steps": len(trace.values) - 1,
        "reached": trace.gradient_norms[-1] <= REACHED * norm,
        "gradient_norm_ratio": trace.gradient_norms[-1] / norm,
        "bound": steps_bound(
            REACHED * norm,
            gap=first - objective.optimum,
            gradient_norm=norm,
            hessian_lipschitz=objective.hessian_lipschitz or 0.0,
            sigma=stated_sigma(objective.size, spectral_norm=objective.spectral_norm or 0.0),
        ),
    }


def recorded(trace: Trace, objective: Objective) -> list[dict[str, Any]]:
    """Return rows at steps about evenly spaced on a log scale; the last has the shares over all steps."""
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "products": trace.num_products[step],
            "passes": step + trace.num_products[step],
            "gradient_norm": trace.gradient_norms[step],
            "gap": trace.values[step] - objective.optimum,
            **{name: _of_step(trace, step, name) for name in ("alpha", "spectral_norm", "hessian_lipschitz")},
        }
        for step in trace.logarithmic_steps(NUM_RECORDED)
    ]
    rows[-1] |= trace.shares(objective.spectral_norm or 0.0) | {"diverged": trace.diverged}
    return rows


def _of_step(trace: Trace, step: int, name: str) -> float | None:
    """Return what step k used; at the last point, from which no step was taken, what the last step used."""
    if not trace.directions:
        return None
    value = float(getattr(trace.directions[min(step, len(trace.directions) - 1)], name))
    return None if math.isnan(value) else value
