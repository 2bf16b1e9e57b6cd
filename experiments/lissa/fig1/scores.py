"""Fig. 1, scores: influence and retraining responses of the same training points, for each choice of batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, example_importance
from curvlab.influence import (
    ProximalBregmanObjective,
    ProximalNewton,
    directional_derivatives,
    loss_response,
    per_example_gradients,
)
from curvlab.lab import Run
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient, LissaHyperparameters
from experiments.lissa.fig1.paired import run_paired
from experiments.lissa.fig1.records import Pairs, Scores
from experiments.lissa.fig1.settings import given_settings, measured_batch_size, settings_of
from experiments.shared.spectrum import constants
from experiments.shared.spectrum import spectrum as measured_spectrum
from experiments.shared.task import TrainedTask
from experiments.shared.trace_alone import trace_alone

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Setup:
    """What the methods share."""

    run: Run
    task: TrainedTask
    damping: float
    points: Batch
    test: Batch

    @property
    def damped(self) -> LinearOperator:
        return GaussNewtonOperator(self.task.model, self.task.loss, self.task.train) + self.damping * identity

    def first(self, num_points: int) -> _Setup:
        """Return the same for the first so many points."""
        return dataclasses.replace(self, points=(self.points[0][:num_points], self.points[1][:num_points]))

    def gradients(self) -> Tensor:
        """Return the points' gradients, (P, K)."""
        return per_example_gradients(self.task.model, self.task.loss, self.points).T

    def influences(self, solutions: Tensor) -> Tensor:
        """Return -∇l(test)ᵀ x for each solution x, (P, K) -> (M, K)."""
        return -directional_derivatives(self.task.model, self.task.loss, self.test, solutions)

    def objective(self, epsilon: float | Tensor) -> ProximalBregmanObjective:
        task = self.task
        return ProximalBregmanObjective(
            task.model, task.loss, task.train, self.points, damping=self.damping, epsilon=epsilon
        )

    def responses(self, displacement: Tensor, epsilon: float | Tensor) -> Tensor:
        """Return the finite changes of the test losses, divided by epsilon, (P, K) -> (M, K)."""
        return loss_response(self.task.model, self.task.loss, self.test, displacement, epsilon=epsilon)


def compute_scores(run: Run, task: TrainedTask, cfg: DictConfig) -> Scores:
    """Measure the spectrum, derive the settings from it, and run the methods, unit by unit.

    All scores are changes of a test loss per unit weight added to the point's loss in the mean training loss
    (the paper plots the same numbers with log p, the other sign, on both axes).
    """
    if cfg.num_seeds < 2:
        raise ValueError(
            f"num_seeds must be at least 2, got {cfg.num_seeds}: LiSSA of a seed is compared with SGD on its own "
            "batches, and with SGD on the next seed's"
        )
    generator = run.generator("points", task.splits.name)
    test_indices = _draw(len(task.splits.test), cfg.num_test, generator)  # type: ignore[arg-type]
    point_indices = _draw(task.num_train, cfg.num_points, generator)
    test, points = stack(task.splits.test, test_indices), stack(task.train, point_indices)
    # Of a large network λmax takes hours, and nothing asks for it where the paper's settings are given.
    given = cfg.damping is not None and None not in given_settings(cfg).values()
    spectrum = trace_alone(run, task, cfg) if given else measured_spectrum(run, task, cfg)
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * spectrum["largest_eigenvalue"]
    setup = _Setup(run, task, damping, points, test)
    key = task.key | {"damping": damping, "num_points": len(point_indices), "num_test": len(test_indices)}
    return Scores(
        point_indices=task.train_indices[point_indices],
        test_indices=test_indices,
        images=points[0],
        spectrum=spectrum,
        damping=damping,
        assumed=_pairs(setup, key, cfg, settings_of(cfg, spectrum, damping), cfg.lissa.constant),
        measured=_measured(setup, key, cfg, spectrum),
        importance=_by_importance(setup, key, cfg, spectrum),
        larger=_with_larger_epsilon(setup, key, cfg, spectrum),
        **_reference(setup, key, cfg),
    )


def _measured(setup: _Setup, key: dict[str, Any], cfg: DictConfig, spectrum: dict[str, float]) -> Pairs | None:
    """Return the same pair with C measured, which is all that changes: the run that explains where C = 2 fails."""
    num_points = int(min(_all_or(cfg.measured.points), len(setup.points[1])))
    if num_points == 0:
        return None
    found = constants(setup.run, setup.task, cfg, trace=spectrum["trace"])["largest"]
    constant = cfg.measured.safety * max(1.0, found)
    settings = dataclasses.replace(
        settings_of(cfg, spectrum, setup.damping),
        batch_size=measured_batch_size(spectrum, setup.damping, constant, cfg.lissa.step_size),
    )
    return _pairs(setup.first(num_points), key | {"num_points": num_points}, cfg, settings, constant)


def _by_importance(
    setup: _Setup, key: dict[str, Any], cfg: DictConfig, spectrum: dict[str, float]
) -> Pairs | None:
    """Return the pair of C = 2 once more, whose examples are drawn with probability ∝ tr(G_i) by both."""
    num_points = int(min(_all_or(cfg.importance.points), len(setup.points[1])))
    if num_points == 0:
        return None
    run, task = setup.run, setup.task

    def compute() -> dict[str, Any]:
        operator = GaussNewtonOperator(task.model, task.loss, task.train)
        found = example_importance(operator, generator=run.generator("importance", task.seed_name))
        run.add_matvecs(found.num_matvecs)
        return {"probabilities": found.probabilities}

    about = f"traces of the examples of {task.label}"
    weights = run.unit("lissa/example_importance", task.key, compute, version=1, about=about)["probabilities"]
    settings = settings_of(cfg, spectrum, setup.damping)
    key = key | {"num_points": num_points, "sampling": "importance"}
    return _pairs(setup.first(num_points), key, cfg, settings, cfg.lissa.constant, weights)


def _with_larger_epsilon(
    setup: _Setup, key: dict[str, Any], cfg: DictConfig, spectrum: dict[str, float]
) -> Pairs | None:
    """Return the pair of C = 2 once more, whose SGD goes as far from θ* as the authors' code has it."""
    num_points = int(min(_all_or(cfg.larger.points), len(setup.points[1])))
    if num_points == 0:
        return None
    settings, key = settings_of(cfg, spectrum, setup.damping), key | {"num_points": num_points}
    return _pairs(
        setup.first(num_points), key, cfg, settings, cfg.lissa.constant, epsilon=float(cfg.larger.epsilon)
    )


def _pairs(  # noqa: PLR0917
    setup: _Setup,
    key: dict[str, Any],
    cfg: DictConfig,
    settings: LissaHyperparameters,
    constant: float,
    weights: Tensor | None = None,
    epsilon: float | None = None,
) -> Pairs:
    epsilon = cfg.pbrf.epsilon if epsilon is None else epsilon
    full = weights is None and settings.batch_size >= setup.task.num_train
    key = key | dataclasses.asdict(settings) | {"epsilon": epsilon}
    found = [
        setup.run.unit(
            "lissa/paired",
            key | {"repetition": seed},
            partial(_paired, setup, settings, epsilon, seed, weights),
            version=1,
            about=f"LiSSA, SGD {setup.task.label}, |B| = {settings.batch_size}, seed {seed}, epsilon {epsilon:g}",
        )
        for seed in range(1 if full else cfg.num_seeds)
    ]
    names = ("lissa", "pbrf", "lissa_lengths", "sgd_lengths", "distances")
    return Pairs(
        settings,
        math.nan if cfg.lissa.batch_size is not None and constant == cfg.lissa.constant else constant,
        *(torch.stack([unit[name].double() for unit in found]) for name in names),
    )


def _paired(
    setup: _Setup, settings: LissaHyperparameters, epsilon: float, seed: int, weights: Tensor | None
) -> dict[str, Any]:
    run, task, gradients = setup.run, setup.task, setup.gradients()
    bar = run.progress(settings.num_steps, f"LiSSA and SGD {task.label}, |B| = {settings.batch_size}, seed {seed}")
    generators = (run.generator("batches", task.seed_name, seed), run.generator("batches", task.seed_name, seed))
    found = run_paired(
        setup.objective(epsilon), setup.damped, gradients, settings, generators, bar.update, weights=weights
    )
    run.add_matvecs(settings.num_steps * gradients.shape[1])
    # Relative to ‖g‖ / damping, which no solution of (G + damping) x = g exceeds.
    scale = setup.damping / torch.linalg.vector_norm(gradients.double(), dim=0)
    return {
        "lissa": setup.influences(found.solutions),
        "pbrf": setup.responses(found.displacement, epsilon),
        "lissa_lengths": found.lissa_norms * scale,
        "sgd_lengths": found.sgd_norms * scale,
        "distances": found.distances * scale,
    }


def _reference(setup: _Setup, key: dict[str, Any], cfg: DictConfig) -> dict[str, Any]:
    """Return what tells solver error from linearisation error, for the first `exact_points` points."""
    num_exact = min(cfg.exact_points, len(setup.points[1]))
    none = torch.zeros(len(setup.test[1]), 0, dtype=torch.float64)
    if num_exact == 0:
        return {"cg": none, "exact": none, "residuals": {"cg": math.nan, "newton": math.nan}}
    first, key = setup.first(num_exact), key | {"exact_points": num_exact}
    solved = setup.run.unit(
        "influence/cg",
        key | {"rtol": cfg.exact.cg_rtol},
        partial(_by_cg, first, cfg.exact.cg_rtol),
        version=1,
        about=f"CG {setup.task.label}",
    )
    minimised: dict[str, Any] = {"scores": none, "residual": math.nan}
    if cfg.exact.pbrf:
        minimised = setup.run.unit(
            "pbrf/newton",
            key | {"rtol": cfg.exact.newton_rtol, "displacement": cfg.exact.displacement},
            partial(_pbrf_by_newton, first, cfg.exact),
            version=1,
            about=f"exact PBRF {setup.task.label}",
        )
    return {
        "cg": solved["scores"].double(),
        "exact": minimised["scores"].double(),
        "residuals": {"cg": solved["residual"], "newton": minimised["residual"]},
    }


def _draw(size: int, wanted: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator)[: min(wanted, size)]


def _all_or(number: int | None) -> float:
    return math.inf if number is None else number


def _by_cg(setup: _Setup, rtol: float) -> dict[str, Any]:
    bar = setup.run.progress(0, f"CG {setup.task.label}")
    solution = BlockConjugateGradient(rtol, callback=_advance(bar)).solve(setup.damped, setup.gradients())
    setup.run.add_matvecs(solution.num_matvecs)
    return {"scores": setup.influences(solution.x), "residual": float(solution.residual.max())}


def _pbrf_by_newton(setup: _Setup, cfg: DictConfig) -> dict[str, Any]:
    bar = setup.run.progress(0, f"exact PBRF {setup.task.label}")
    inner = BlockConjugateGradient(rtol=1e-3, max_steps=500, callback=_advance(bar))
    # ‖θ(ε) - θ*‖ <= ε‖∇l‖ / damping to first order: this ε bounds it, alike for fitted and badly fitted points.
    norms = torch.linalg.vector_norm(setup.gradients().double(), dim=0)
    epsilon = cfg.displacement * setup.damping / norms.clamp(min=torch.finfo(torch.float32).tiny)
    response = ProximalNewton(rtol=cfg.newton_rtol, max_steps=cfg.newton_steps, solver=inner).minimize(
        setup.objective(epsilon)
    )
    setup.run.add_matvecs(response.num_matvecs)
    scores = setup.responses(response.displacement, epsilon)
    return {"scores": scores, "residual": float(response.gradient_norm.max())}


def _advance(bar: Any) -> Callable[[object], None]:
    return lambda state: bar.update()
