"""Runs of the lemma's method on objectives that are convex or not, and draws at a point where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig

from curvlab.lab import Run, task_label, task_settings
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.linalg import flatten
from curvlab.optim import UniformDirection, printed_steps_bound, stated_sigma, steps_bound
from experiments.rank1.descent import Trace, descend
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
from experiments.shared.task import LOSSES

SCALE = 1e-12  # of the objective that shows what Eq. 3 as printed is worth


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each (objective, seed, ε), `summary` and `definiteness`.

    Args:
        run: seeds, store.
        cfg: `logistic` (data, l2), `tasks` (networks), `epsilons` as multiples of ‖∇f(x_0)‖, `max_steps`,
            `max_steps_network`, `num_seeds`; `cosine_sizes` n and `num_draws` for `indefinite_draws`.
    """
    rows: list[dict[str, Any]] = []
    for key, (make, settings) in run.progress(list(objectives(run, cfg).items()), "objectives"):
        for seed in range(cfg.num_seeds):
            config = {"objective": key, "number": seed, "epsilons": list(cfg.epsilons), **settings}
            steps = partial(_steps, run, make, config)
            rows += run.unit("rank1/rate", config, steps, version=1, about=f"{key}, seed {seed}")["rows"]
    run.note(seeds=list(range(cfg.num_seeds)))
    table = pd.DataFrame(rows)
    definiteness = pd.DataFrame([indefinite_draws(run, size) for size in cfg.cosine_sizes])
    return {"table": table, "summary": summary(table), "definiteness": definiteness}


def objectives(run: Run, cfg: DictConfig) -> dict[str, tuple[Callable[[], Objective], dict[str, Any]]]:
    """Return makers of the objectives, each run starts from a new one, with what else their runs depend on."""
    splits = _load(run, cfg.logistic.data)
    found: dict[str, Callable[[], Objective]] = {
        "curve": lambda: square_root_curve(3.0),
        "curve, scaled": lambda: scaled(square_root_curve(3.0), SCALE),
        "isotropic": lambda: quadratic("isotropic", 10, run.generator("quadratic")),
        "power": lambda: quadratic("power", 10, run.generator("quadratic")),
        "logistic": partial(logistic_regression, splits, l2=cfg.logistic.l2),
        "cosines": lambda: cosines(5, 2.8),
        "trapping": lambda: trapping_curve(3.1),
    }
    more = {"logistic": {"data": splits.checksum, "l2": cfg.logistic.l2}}
    coded = {key: (make, {"max_steps": cfg.max_steps, **more.get(key, {})}) for key, make in found.items()}
    tasks = {task_label(name): task for name, task in task_settings(cfg).items()}
    return coded | {label: _network(run, label, task) for label, task in tasks.items()}


def _network(run: Run, label: str, task: DictConfig) -> tuple[Callable[[], Objective], dict[str, Any]]:
    splits = _load(run, task.data)

    def make() -> Objective:
        model = build_model(
            partial(instantiate, task.model),
            input_shape=splits.input_shape,
            num_outputs=splits.num_outputs,
            generator=run.generator("model"),
        )
        inputs, targets = splits.train.tensors  # type: ignore[attr-defined]  # a TensorDataset
        pair = (inputs.double(), targets.double() if targets.is_floating_point() else targets)
        return neural_network(model.double(), pair, LOSSES[splits.task](), name=label)

    return make, {"max_steps": task.max_steps_network, "data": splits.checksum, "model": dict(task.model)}


def _load(run: Run, data: DictConfig) -> DataSplits:
    splits: DataSplits = instantiate(data)
    run.record_data(splits.name, splits.checksum)
    return splits


def _steps(run: Run, make: Callable[[], Objective], config: dict[str, Any]) -> dict[str, Any]:
    objective, seed = make(), config["number"]
    known = objective.spectral_norm
    optimizer = UniformDirection(
        objective.parameters,
        objective.hessian,
        sigma=None if known is None else stated_sigma(objective.size, spectral_norm=known),
        hessian_lipschitz=objective.hessian_lipschitz,
        safeguard=False,
        refresh_period=50,
        generator=run.generator("directions", seed),
    )
    objective.closure()
    first = float(flatten(p.grad for p in objective.parameters if p.grad is not None).norm())
    epsilons = [ratio * first for ratio in config["epsilons"]]
    trace = descend(objective, optimizer, num_steps=config["max_steps"], stop_at=min(epsilons))
    run.add_matvecs(trace.num_products[-1])
    return {"rows": [_row(objective, trace, config["objective"], seed, epsilon) for epsilon in epsilons]}


def _row(objective: Objective, trace: Trace, key: str, seed: int, epsilon: float) -> dict[str, Any]:
    """Return measured steps beside the bound at one ε."""
    spectral_norm, lipschitz = objective.spectral_norm, objective.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        spectral_norm, lipschitz = trace.directions[-1].spectral_norm, trace.directions[-1].hessian_lipschitz
    constants = {
        # The lemma counts k >= 1; the gap to the best value seen is a harder test than the gap to f*.
        "gap": trace.values[0]
        - (objective.optimum if objective.optimum > 0 else min(objective.optimum, *trace.values)),
        "gradient_norm": trace.gradient_norms[0],
        "hessian_lipschitz": lipschitz,
        "sigma": stated_sigma(objective.size, spectral_norm=spectral_norm),
    }
    return {
        "key": key,
        "objective": objective.name,
        "n": objective.size,
        "seed": seed,
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
    num_draws, generator = run.cfg.num_draws, run.generator("definiteness", size)
    indefinite, uphill, longest = 0, 0, 0.0
    alpha = gradient_norm = 0.0
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
        info = optimizer.last_step
        if info is None:
            raise RuntimeError("a step was taken, but not recorded")
        indefinite += info.smallest_eigenvalue + info.shift <= 0
        uphill += info.slope > 0
        longest = max(longest, info.step_norm)
        alpha, gradient_norm = info.alpha, info.gradient_norm
    return {
        "n": size,
        "draws": num_draws,
        "gradient_norm": gradient_norm,
        "alpha": alpha,
        "share_not_definite": indefinite / num_draws,
        "share_uphill": uphill / num_draws,
        "longest_step_by_alpha": longest * alpha / gradient_norm,
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each (objective, ε): steps (median over the seeds that reached it) and K(ε).

    `growth`: slope of log steps on log 1/ε of the objective, largest over seeds; the shares are over steps.
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
        name: max(_growth(run) for _, run in own.groupby("seed")) for name, own in table.groupby("objective")
    }
    found = found.reset_index()
    return found.assign(growth=found.objective.map(growth))


def _growth(own: pd.DataFrame) -> float:
    """Return the slope of log steps on log 1/ε of one run; nan with fewer than three ε reached."""
    reached = own[own.steps.notna()]
    if len(reached) < 3:
        return math.nan
    return float(np.polyfit(-np.log(reached.epsilon), np.log(reached.steps.astype(float)), 1)[0])
