"""Rates of the Fisher preconditioner on perceptrons, whose constants are known."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab.optim import CubicNewton, FisherNewton, steps_bound
from curvlab.runs import Run
from experiments.rank1.descent import Trace, current_point, descend, restart
from experiments.rank1.fisher_models import FisherTask, convex_parabola_task, perceptron_task


class RateTask(NamedTuple):
    """How a task is made: perceptrons by scale, activation and noise; a parabola by its curvature."""

    kind: str
    scale: float = 1.0
    activation: str = "tanh"
    noise: float = 0.0
    curvature: float | None = None


TASKS = {
    "least squares, f* = 0": RateTask("least squares"),
    "least squares, noisy": RateTask("least squares", noise=0.5),
    "least squares, convex": RateTask("least squares", 3.0, "softplus", 0.5),
    "softmax, L = 2.3": RateTask("softmax", 3.0, "tanh", 0.2),
    "softmax, convex": RateTask("softmax", 3.0, "softplus"),
    "softmax, linear (L = 0)": RateTask("softmax", 1.0, "identity", 0.2),
    "softmax, parabola (L = 20)": RateTask("softmax", curvature=20.0),
}
PARABOLA_START = 0.06
METHODS = ("lemma", "lemma as printed", "σ = 0", "cubic Newton")  # the second for softmax alone
NUM_RECORDED = 50


def rate_rows(run: Run, cfg: DictConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of curves (task, method, seed, step) and of steps against bounds (task, seed, ε)."""
    curves: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    for name, settings in run.progress(list(TASKS.items()), "rates"):
        for seed in range(cfg.num_seeds if settings.curvature is None else 1):
            config = {
                "task": name,
                "settings": settings._asdict(),
                "number": seed,
                "max_steps": cfg.max_steps,
                "epsilons": list(cfg.epsilons),
                "version": 2,
            }
            stored = run.unit("rank1/fisher-rates", config, partial(_compute, run, name, seed))
            curves += stored["curves"]
            rates += stored["rates"]
    return curves, rates


def make_task(settings: RateTask, generator: torch.Generator) -> FisherTask:
    """Return a task, its data and start drawn from the generator."""
    if settings.curvature is not None:
        return convex_parabola_task(curvature=settings.curvature, start=PARABOLA_START)
    return perceptron_task(
        settings.kind,
        scale=settings.scale,
        activation=settings.activation,
        noise=settings.noise,
        generator=generator,
    )


def _compute(run: Run, name: str, seed: int) -> dict[str, Any]:
    settings = TASKS[name]
    task = make_task(settings, run.generator("rate task", name, seed))
    start = current_point(task.problem)
    traces: dict[str, Trace] = {}
    for method in METHODS:
        if method == "lemma as printed" and settings.kind != "softmax":
            continue
        restart(task.problem, start)
        optimizer = make_optimizer(task, method)
        traces[method] = descend(task.problem, optimizer, num_steps=run.cfg.max_steps, stop_at=1e-10)
        run.add_matvecs(traces[method].num_products[-1])
    # f* of perceptrons: zero where it is known, else the best value that any of the methods has met.
    if settings.curvature is None:
        known = settings.kind == "least squares" and settings.activation == "tanh" and settings.noise == 0
        optimum = 0.0 if known else min(min(trace.values) for trace in traces.values())
        task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, optimum=optimum))
    curves = [
        row for method, trace in traces.items() for row in _curve(name, method, seed, trace, task.problem.optimum)
    ]
    rates = [
        _rate(task, (name, method, seed), traces[method], ratio)
        for method in traces
        if method.startswith("lemma")
        for ratio in run.cfg.epsilons
    ]
    return {"curves": curves, "rates": rates}


def make_optimizer(task: FisherTask, method: str) -> Optimizer:
    """Return the Fisher method with the lemma's α_k, with 1 or 0 in place of L, or cubic Newton; one M for all."""
    lipschitz = float(task.problem.hessian_lipschitz or 0.0)
    if method == "cubic Newton":
        return CubicNewton(task.problem.parameters, task.problem.hessian, hessian_lipschitz=lipschitz)
    smoothness = {"lemma": float(task.smoothness or 0.0), "lemma as printed": 1.0, "σ = 0": 0.0}[method]
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


def _rate(task: FisherTask, what: tuple[str, str, int], trace: Trace, ratio: float) -> dict[str, Any]:
    """Return steps to ε = ratio ‖∇f(x_0)‖ beside K(ε): with L, or as the slides print it for softmax, with 1."""
    name, method, seed = what
    norms, values = np.array(trace.gradient_norms), np.array(trace.values)
    epsilon, optimum = ratio * norms[0], task.problem.optimum
    reached = np.flatnonzero(norms[1:] <= epsilon)
    steps = int(reached[0]) + 1 if len(reached) else None
    # R: the lemma needs f - f* <= R ‖∇f‖ up to the step that reaches ε.
    radius = float(np.max((values - optimum)[:steps] / norms[:steps]))
    smoothness = float(task.smoothness or 0.0)
    constant = smoothness if method == "lemma" else 1.0
    common = {
        "gap": float(values[0] - optimum),
        "gradient_norm": float(norms[0]),
        "hessian_lipschitz": float(task.problem.hessian_lipschitz or 0.0),
    }
    kind = TASKS[name].kind
    if kind == "least squares":  # σ = 2 L sqrt(f) for the mean of r², L sqrt(2 S f) in the slides' scale
        parts = {"sigma": 2 * constant * optimum**0.5, "sigma_root": 2 * constant * radius**0.5}
    else:
        parts = {"sigma": 2 * constant * optimum, "sigma_slope": 2 * constant * radius}
    return {
        "task": name,
        "kind": kind,
        "method": method,
        "seed": seed,
        "epsilon": epsilon,
        "relative_epsilon": ratio,
        "steps": steps,
        "steps_taken": len(values) - 1,
        "bound": steps_bound(epsilon, **common, **parts),
        "radius": radius,
        "L": smoothness,
        **common,
    }
