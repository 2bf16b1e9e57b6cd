"""Rates of the Fisher preconditioner on perceptrons, whose constants are known."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab.optim import CubicNewton, FisherNewton, steps_bound
from curvlab.runs import Run
from experiments.rank1.descent import Trace, current_point, descend, restart
from experiments.rank1.fisher_models import FisherTask, perceptron_task

# name: kind, scale, linear, noise
TASKS: dict[str, tuple[str, float, bool, float]] = {
    "least squares, f* = 0": ("least squares", 1.0, False, 0.0),
    "least squares, noisy": ("least squares", 1.0, False, 0.5),
    "softmax, L = 2.3": ("softmax", 3.0, False, 0.2),
    "softmax, linear (L = 0)": ("softmax", 1.0, True, 0.2),
}
METHODS = ("lemma", "σ = 0", "cubic Newton")
NUM_RECORDED = 50


def rate_rows(run: Run, cfg: DictConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of curves (task, method, seed, step) and of steps against bounds (task, seed, ε)."""
    curves: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    for name, settings in TASKS.items():
        for seed in range(cfg.num_seeds):
            config = {
                "task": name,
                "settings": list(settings),
                "number": seed,
                "max_steps": cfg.max_steps,
                "epsilons": list(cfg.epsilons),
                "version": 1,
            }
            stored = run.unit("rank1/fisher-rates", config, partial(_compute, run, name, seed))
            curves += stored["curves"]
            rates += stored["rates"]
    return curves, rates


def _compute(run: Run, name: str, seed: int) -> dict[str, Any]:
    kind, scale, linear, noise = TASKS[name]
    task = perceptron_task(
        kind, scale=scale, linear=linear, noise=noise, generator=run.generator("rate task", name, seed)
    )
    start = current_point(task.problem)
    traces: dict[str, Trace] = {}
    for method in METHODS:
        restart(task.problem, start)
        optimizer = make_optimizer(task, method)
        traces[method] = descend(task.problem, optimizer, num_steps=run.cfg.max_steps, stop_at=1e-10)
        run.add_matvecs(traces[method].num_products[-1])
    # f*: zero where it is known, else the best value that any of the methods has met.
    best = min(min(trace.values) for trace in traces.values())
    optimum = 0.0 if kind == "least squares" and noise == 0 else best
    problem = dataclasses.replace(task.problem, optimum=optimum)
    task = dataclasses.replace(task, problem=problem)
    curves = [row for method in METHODS for row in _curve(name, method, seed, traces[method], optimum)]
    rates = [_rate(task, name, seed, traces["lemma"], ratio) for ratio in run.cfg.epsilons]
    return {"curves": curves, "rates": rates}


def make_optimizer(task: FisherTask, method: str) -> Optimizer:
    """Return the Fisher method with the lemma's α_k, without σ, or cubic Newton, all with the same M."""
    lipschitz = float(task.problem.hessian_lipschitz or 0.0)
    if method == "cubic Newton":
        return CubicNewton(task.problem.parameters, task.problem.hessian, hessian_lipschitz=lipschitz)
    smoothness = float(task.smoothness or 0.0) if method == "lemma" else 0.0
    return FisherNewton(task.problem.parameters, task.fisher, smoothness=smoothness, hessian_lipschitz=lipschitz)


def _curve(name: str, method: str, seed: int, trace: Trace, optimum: float) -> list[dict[str, Any]]:
    last = len(trace.values) - 1
    steps = [0, *np.unique(np.geomspace(1, max(last, 1), NUM_RECORDED).round().astype(int))]
    return [
        {
            "task": name,
            "method": method,
            "seed": seed,
            "step": int(step),
            "gradient_norm": trace.gradient_norms[step],
            "gap": trace.values[step] - optimum,
        }
        for step in steps
        if step <= last
    ]


def _rate(task: FisherTask, name: str, seed: int, trace: Trace, ratio: float) -> dict[str, Any]:
    """Return steps to ε = ratio ‖∇f(x_0)‖ beside K(ε) with L, and as printed for softmax, without it."""
    norms, values = np.array(trace.gradient_norms), np.array(trace.values)
    epsilon, optimum = ratio * norms[0], task.problem.optimum
    reached = np.flatnonzero(norms[1:] <= epsilon)
    steps = int(reached[0]) + 1 if len(reached) else None
    # R: the lemma needs f - f* <= R ‖∇f‖ up to the step that reaches ε.
    radius = float(np.max((values - optimum)[:steps] / norms[:steps]))
    smoothness, kind = float(task.smoothness or 0.0), TASKS[name][0]
    common = {
        "gap": float(values[0] - optimum),
        "gradient_norm": float(norms[0]),
        "hessian_lipschitz": float(task.problem.hessian_lipschitz or 0.0),
    }

    def bound(constant: float) -> float:
        if kind == "least squares":  # σ = 2 L sqrt(f) for the mean of r², L sqrt(2 S f) in the slides' scale
            root, level = 2 * constant * radius**0.5, 2 * constant * optimum**0.5
            return steps_bound(epsilon, **common, sigma=level, sigma_root=root)
        return steps_bound(epsilon, **common, sigma=2 * constant * optimum, sigma_slope=2 * constant * radius)

    return {
        "task": name,
        "kind": kind,
        "seed": seed,
        "epsilon": epsilon,
        "relative_epsilon": ratio,
        "steps": steps,
        "steps_taken": len(values) - 1,
        "bound": bound(smoothness),
        # The slides' softmax lemma has 1 in place of L, and would then have α_k too small where L > 1.
        "bound_without_L": bound(1.0) if kind == "softmax" else None,
        "radius": radius,
        "L": smoothness,
        **common,
    }
