"""Steps to ‖∇f‖ <= ε against the lemma's K(ε) (Semenov 2025, uniform directions).

make rank1-rate PRESET=smoke|embedded|laptop|paper ARGS="max_steps=10000"

The method as in the lemma: S, one direction, δ = 0, α_k = sqrt(M ‖∇f‖ / 2) + λ sqrt(n (n - 1)), no safeguard. M
and λ are global constants in closed form, except for the network, where both are the largest values on the path,
as measured by the optimizer. Eq. 3 is taken with log(‖∇f(x_0)‖ / ε); as printed, / 2, it is no bound: the first
problem is run a second time, multiplied by 1e-12, which changes no step.

The lemma says that f may be non-convex, and bounds D - H on average. Its proof needs D positive semi-definite
(or nearly, as for convex f): on the trapping curve, where it is not, the method cycles for ever. Not even
D + α_k I need be definite: `definiteness.csv` counts draws where it is not, for H = diag(cos x_i) near a maximum.
`growth` in summary.csv is the slope of log steps on log 1/ε; the bound's are 3/2 (σ = 0) and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab import runs
from curvlab.models import build_model
from curvlab.optim import UniformDirection, printed_steps_bound, stated_sigma, steps_bound
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.rank1.descent import Trace, descend
from experiments.rank1.problems import (
    Problem,
    cosines,
    logistic_regression,
    network,
    quadratic,
    scaled,
    square_root_curve,
    trapping_curve,
)
from experiments.rank1.rate_claims import judge_claims
from experiments.rank1.rate_plot import draw

SCALE = 1e-12  # of the problem that shows what Eq. 3 as printed is worth


@runs.main("rank1/rate_steps_bound")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="rate", title="Steps to ε against K(ε)") as run:
        rows: list[dict[str, Any]] = []
        for key, make in run.progress(list(problems(run, cfg).items()), "problems"):
            for seed in range(cfg.num_seeds):
                stored = run.unit("rank1/rate", _config(cfg, key, seed), partial(_compute, run, make, key, seed))
                rows += stored["rows"]
        table = pd.DataFrame(rows)
        run.save_table(table)
        run.save_table(summary(table), "summary.csv")
        definiteness = pd.DataFrame([indefinite_draws(run, size) for size in cfg.cosine_sizes])
        run.save_table(definiteness, "definiteness.csv")
        save_claims(run.folder, judge_claims(table, definiteness))
        for name, figure in draw(table).items():
            run.save_figure(figure, name)
        run.note(
            scale={
                "problems": {"ours": list(table.problem.unique()), "paper": "any"},
                "steps at most": {"ours": cfg.max_steps, "paper": "K(ε)"},
                "seeds": {"ours": cfg.num_seeds, "paper": "none"},
                "λ, M": {"ours": "closed forms; network: largest on the path", "paper": "suprema"},
            },
            seeds=list(range(cfg.num_seeds)),
        )


def problems(run: Run, cfg: DictConfig) -> dict[str, Callable[[], Problem]]:
    """Return makers of the problems: each run starts from a new one."""
    splits, small = instantiate(cfg.data), instantiate(cfg.network_data)
    for found in (splits, small):
        run.record_data(found.name, found.checksum)

    def small_network() -> Problem:
        model = build_model(
            partial(instantiate, cfg.model),
            input_shape=small.input_shape,
            num_outputs=small.num_outputs,
            generator=run.generator("model"),
        )
        inputs, targets = (tensor.double() for tensor in small.train.tensors)
        return network(model.double(), (inputs, targets), nn.BCEWithLogitsLoss(), name=f"network, {small.name}")

    return {
        "curve": lambda: square_root_curve(3.0),
        "curve, scaled": lambda: scaled(square_root_curve(3.0), SCALE),
        "isotropic": lambda: quadratic("isotropic", 10, run.generator("quadratic")),
        "power": lambda: quadratic("power", 10, run.generator("quadratic")),
        "logistic": lambda: logistic_regression(splits, l2=cfg.l2),
        "cosines": lambda: cosines(5, 2.8),
        "trapping": lambda: trapping_curve(3.1),
        "network": small_network,
    }


def _config(cfg: DictConfig, key: str, seed: int) -> dict[str, Any]:
    config: dict[str, Any] = {"problem": key, "number": seed, "epsilons": list(cfg.epsilons), "version": 2}
    config["max_steps"] = cfg.max_steps_network if key == "network" else cfg.max_steps
    if key == "logistic":
        config |= {"data": _choices(cfg.data), "l2": cfg.l2}
    if key == "network":
        config |= {"data": _choices(cfg.network_data), "model": _choices(cfg.model)}
    return config


def _choices(node: DictConfig) -> dict[str, Any]:
    """Return a group's settings without the place of its files."""
    return {str(name): value for name, value in OmegaConf.to_container(node).items() if name != "root"}  # type: ignore[union-attr]


def _compute(run: Run, make: Callable[[], Problem], key: str, seed: int) -> dict[str, Any]:
    problem, config = make(), _config(run.cfg, key, seed)
    known = problem.spectral_norm is not None
    optimizer = UniformDirection(
        problem.parameters,
        problem.hessian,
        sigma=stated_sigma(problem.size, spectral_norm=problem.spectral_norm) if known else None,  # type: ignore[arg-type]
        hessian_lipschitz=problem.hessian_lipschitz,
        safeguard=False,
        refresh_period=50,
        generator=run.generator("directions", seed),
    )
    first = float(problem.closure().detach()), _norm(problem)
    epsilons = [ratio * first[1] for ratio in config["epsilons"]]
    trace = descend(problem, optimizer, num_steps=config["max_steps"], stop_at=min(epsilons))
    run.add_matvecs(trace.num_products[-1])
    return {"rows": [_row(problem, trace, key, seed, epsilon) for epsilon in epsilons]}


def _norm(problem: Problem) -> float:
    return float(torch.cat([p.grad.reshape(-1) for p in problem.parameters if p.grad is not None]).norm())


def _row(problem: Problem, trace: Trace, key: str, seed: int, epsilon: float) -> dict[str, Any]:
    """Return measured steps beside the bound at one ε."""
    spectral_norm, lipschitz = problem.spectral_norm, problem.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        spectral_norm, lipschitz = trace.spectral_norms[-1], trace.lipschitz_constants[-1]
    constants = {
        # The lemma counts k >= 1; the gap to the best value seen is a harder test than the gap to f*.
        "gap": trace.values[0] - (problem.optimum if problem.optimum > 0 else min(problem.optimum, *trace.values)),
        "gradient_norm": trace.gradient_norms[0],
        "hessian_lipschitz": lipschitz,
        "sigma": stated_sigma(problem.size, spectral_norm=spectral_norm),
    }
    norms = np.array(trace.gradient_norms)
    reached = np.flatnonzero(norms[1:] <= epsilon)
    values, smallest, shifts = np.array(trace.values), np.array(trace.smallest), np.array(trace.shifts)
    return {
        "key": key,
        "problem": problem.name,
        "n": problem.size,
        "seed": seed,
        "epsilon": epsilon,
        "relative_epsilon": epsilon / norms[0],
        "steps": int(reached[0]) + 1 if len(reached) else None,
        "steps_taken": len(values) - 1,
        "bound": steps_bound(epsilon, **constants),
        "printed_bound": printed_steps_bound(epsilon, **constants),
        **constants,
        "share_rising": float((np.diff(values) > 1e-14 * abs(values[0])).mean()),
        "share_uphill": float((np.array(trace.slopes) > 0).mean()),
        "share_indefinite": float((smallest < -1e-12 * spectral_norm).mean()),
        "share_singular": float((smallest + shifts <= 0).mean()),
        "diverged": trace.diverged,
    }


def indefinite_draws(run: Run, size: int) -> dict[str, Any]:
    """Return the shares of draws at one point of Σ (1 - cos x_i) near its maximum for which the lemma fails."""
    num_draws, generator = run.cfg.num_draws, run.generator("definiteness", size)
    indefinite, uphill, longest = 0, 0, 0.0
    alpha = gradient_norm = 0.0
    for _ in range(num_draws):
        problem = cosines(size, 3.0)
        optimizer = UniformDirection(
            problem.parameters,
            problem.hessian,
            sigma=stated_sigma(size, spectral_norm=1.0),
            hessian_lipschitz=1.0,
            safeguard=False,
            generator=generator,
        )
        optimizer.step(problem.closure)
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
    """Return one row a (problem, ε): steps (median over the seeds that reached it) and K(ε).

    `growth`: slope of log steps on log 1/ε of the problem, largest over seeds; the shares are over steps.
    """
    found = table.groupby(["problem", "relative_epsilon"], sort=False).agg(
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
    growth = {name: max(_growth(run) for _, run in own.groupby("seed")) for name, own in table.groupby("problem")}
    found = found.reset_index()
    return found.assign(growth=found.problem.map(growth))


def _growth(own: pd.DataFrame) -> float:
    """Return the slope of log steps on log 1/ε of one run; nan with fewer than three ε reached."""
    reached = own[own.steps.notna()]
    if len(reached) < 3:
        return math.nan
    return float(np.polyfit(-np.log(reached.epsilon), np.log(reached.steps.astype(float)), 1)[0])


if __name__ == "__main__":
    main()
