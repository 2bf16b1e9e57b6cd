"""Rates of the Fisher preconditioner on perceptrons, whose constants are known."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab.lab import Run
from curvlab.optim import CubicNewton, FisherNewton, steps_bound
from experiments.rank1.descent import Trace, descend
from experiments.rank1.fisher.objectives import FisherObjective, convex_parabola, perceptron


class Recipe(NamedTuple):
    """How an objective is made: perceptrons by scale, activation and noise; a parabola by its curvature."""

    kind: str
    scale: float = 1.0
    activation: str = "tanh"
    noise: float = 0.0
    curvature: float | None = None

    def make(self, generator: torch.Generator) -> FisherObjective:
        """Return the objective, its data and start drawn from the generator."""
        if self.curvature is not None:
            return convex_parabola(curvature=self.curvature, start=PARABOLA_START)
        return perceptron(
            self.kind, scale=self.scale, activation=self.activation, noise=self.noise, generator=generator
        )


RECIPES = {
    "least squares, f* = 0": Recipe("least squares"),
    "least squares, noisy": Recipe("least squares", noise=0.5),
    "least squares, convex": Recipe("least squares", 3.0, "softplus", 0.5),
    "softmax, L = 2.3": Recipe("softmax", 3.0, "tanh", 0.2),
    "softmax, convex": Recipe("softmax", 3.0, "softplus"),
    "softmax, linear (L = 0)": Recipe("softmax", 1.0, "identity", 0.2),
    "softmax, parabola (L = 20)": Recipe("softmax", curvature=20.0),
}
PARABOLA_START = 0.06
METHODS = ("lemma", "lemma as printed", "σ = 0", "cubic Newton")  # the second for softmax alone
NUM_RECORDED = 50


def rate_rows(run: Run, cfg: DictConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of curves (objective, method, seed, step) and of steps against bounds (objective, seed, ε)."""
    curves: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    if unknown := [name for name in cfg.rate_objectives if name not in RECIPES]:
        raise ValueError(f"unknown rate_objectives {unknown}: choose among {', '.join(map(repr, RECIPES))}.")
    for name in run.progress(list(cfg.rate_objectives), "rates"):
        recipe = RECIPES[name]
        for seed in range(cfg.num_seeds if recipe.curvature is None else 1):
            config = {
                "objective": name,
                "recipe": recipe._asdict(),
                "number": seed,
                "max_steps": cfg.max_steps,
                "epsilons": list(cfg.epsilons),
            }
            about = f"rates of {name}, seed {seed}"
            stored = run.unit(
                "rank1/fisher-rates", config, partial(_runs, run, name, seed), version=1, about=about
            )
            curves += stored["curves"]
            rates += stored["rates"]
    return curves, rates


def _runs(run: Run, name: str, seed: int) -> dict[str, Any]:
    recipe = RECIPES[name]
    objective = recipe.make(run.generator("rate task", name, seed))
    start = objective.point()
    traces: dict[str, Trace] = {}
    for method in METHODS:
        if method == "lemma as printed" and recipe.kind != "softmax":
            continue
        objective.move_to(start)
        optimizer = make_optimizer(objective, method)
        traces[method] = descend(objective, optimizer, num_steps=run.cfg.max_steps, stop_at=1e-10)
        run.add_matvecs(traces[method].num_products[-1])
    # f* of perceptrons: zero where it is known, else the best value that any of the methods has met.
    if recipe.curvature is None:
        known = recipe.kind == "least squares" and recipe.activation == "tanh" and recipe.noise == 0
        optimum = 0.0 if known else min(min(trace.values) for trace in traces.values())
        objective = dataclasses.replace(objective, optimum=optimum)
    return {
        "curves": [
            row for method, trace in traces.items() for row in _curve((name, method, seed), trace, objective)
        ],
        "rates": [
            _rate((name, method, seed), traces[method], objective, ratio)
            for method in traces
            if method.startswith("lemma")
            for ratio in run.cfg.epsilons
        ],
    }


def make_optimizer(objective: FisherObjective, method: str) -> Optimizer:
    """Return the Fisher method with the lemma's α_k, with 1 or 0 in place of L, or cubic Newton; one M for all."""
    lipschitz = float(objective.hessian_lipschitz or 0.0)
    if method == "cubic Newton":
        return CubicNewton(objective.parameters, objective.hessian, hessian_lipschitz=lipschitz)
    smoothness = {"lemma": float(objective.smoothness or 0.0), "lemma as printed": 1.0, "σ = 0": 0.0}[method]
    return FisherNewton(objective.parameters, objective.fisher, smoothness=smoothness, hessian_lipschitz=lipschitz)


def _curve(what: tuple[str, str, int], trace: Trace, objective: FisherObjective) -> list[dict[str, Any]]:
    return [
        {
            **dict(zip(("objective", "method", "seed"), what, strict=True)),
            "step": step,
            "gradient_norm": trace.gradient_norms[step],
            "gap": trace.values[step] - objective.optimum,
        }
        for step in trace.logarithmic_steps(NUM_RECORDED)
    ]


def _rate(what: tuple[str, str, int], trace: Trace, objective: FisherObjective, ratio: float) -> dict[str, Any]:
    """Return steps to ε = ratio ‖∇f(x_0)‖ beside K(ε): with L, or as the slides print it for softmax, with 1."""
    name, method, seed = what
    norms, values = np.array(trace.gradient_norms), np.array(trace.values)
    epsilon, optimum = ratio * norms[0], objective.optimum
    steps = trace.steps_to(epsilon)
    # R: the lemma needs f - f* <= R ‖∇f‖ up to the step that reaches ε.
    radius = float(np.max((values - optimum)[:steps] / norms[:steps]))
    smoothness = float(objective.smoothness or 0.0)
    constant = smoothness if method == "lemma" else 1.0
    common = {
        "gap": float(values[0] - optimum),
        "gradient_norm": float(norms[0]),
        "hessian_lipschitz": float(objective.hessian_lipschitz or 0.0),
    }
    kind = RECIPES[name].kind
    if kind == "least squares":  # σ = 2 L sqrt(f) for the mean of r², L sqrt(2 S f) in the slides' scale
        parts = {"sigma": 2 * constant * optimum**0.5, "sigma_root": 2 * constant * radius**0.5}
    else:
        parts = {"sigma": 2 * constant * optimum, "sigma_slope": 2 * constant * radius}
    return {
        "objective": name,
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
