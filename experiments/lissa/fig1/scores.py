"""Fig. 1, scores: influence and retraining responses of the same training points, by four methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.data import stack
from curvlab.influence import (
    ProximalBregmanObjective,
    ProximalNewton,
    ProximalSGD,
    directional_derivatives,
    loss_response,
    per_example_gradients,
)
from curvlab.linalg import LinearOperator, identity
from curvlab.runs import Run
from curvlab.solvers import BlockConjugateGradient, Lissa, LissaHyperparameters, lissa_hyperparameters
from experiments.shared.spectrum import spectrum as measured_spectrum
from experiments.shared.trained_task import TrainedTask

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scores:
    """Everything that Fig. 1 needs about one task.

    Attributes:
        point_indices: (K,) into the training set.
        test_indices: (M,) into the test set.
        images: (K, ...) the points' inputs.
        spectrum: trace, its standard error, largest eigenvalue and its error bound, products paid.
        damping: added to G.
        settings: LiSSA's, and the SGD PBRF's.
        lissa: (seeds, M, K) influence by LiSSA.
        pbrf: (seeds, M, K) response of the test losses by SGD.
        cg: (M, K') influence by conjugate gradients, of the first K' points; K' may be 0.
        exact: (M, K') response by Newton's method.
        lissa_auto: (M, K') or (M, 0) influence by LiSSA with C measured, the last third averaged.
        constant: that C; nan without it.
        residuals: largest relative residual of CG and gradient norm of Newton; nan without them.
        lengths: (seeds, K) ‖x‖ damping / ‖g‖ of LiSSA's result: above 1 it is no solution.
    """

    point_indices: Tensor
    test_indices: Tensor
    images: Tensor
    spectrum: dict[str, float]
    damping: float
    settings: LissaHyperparameters
    lissa: Tensor
    pbrf: Tensor
    cg: Tensor
    exact: Tensor
    lissa_auto: Tensor
    constant: float
    residuals: dict[str, float]
    lengths: Tensor


@dataclass(frozen=True)
class _Setup:
    """What the four methods share."""

    run: Run
    task: TrainedTask
    damping: float
    settings: LissaHyperparameters
    points: Batch
    test: Batch

    @property
    def damped(self) -> LinearOperator:
        return GaussNewtonOperator(self.task.model, self.task.loss, self.task.train) + self.damping * identity

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
    """Measure the spectrum, derive LiSSA's settings from it, and run the four methods, unit by unit.

    All scores are changes of a test loss per unit weight added to the point's loss in the mean training loss
    (the paper plots the same numbers with log p, the other sign, on both axes).
    """
    generator = run.generator("points", task.splits.name)
    test_indices = _draw(len(task.splits.test), cfg.num_test, generator)  # type: ignore[arg-type]
    point_indices = _draw(task.num_train, cfg.num_points, generator)
    test, points = stack(task.splits.test, test_indices), stack(task.train, point_indices)
    spectrum = measured_spectrum(run, task, cfg)
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * spectrum["largest_eigenvalue"]
    setup = _Setup(run, task, damping, _settings(cfg, spectrum, damping), points, test)
    key = task.key | {"damping": damping, "num_points": len(point_indices), "num_test": len(test_indices)}
    lissa, pbrf, lengths = _stochastic(setup, key, cfg)
    return Scores(
        point_indices=task.train_indices[point_indices],
        test_indices=test_indices,
        images=points[0],
        spectrum=spectrum,
        damping=damping,
        settings=setup.settings,
        lissa=lissa,
        pbrf=pbrf,
        lengths=lengths,
        **_reference(setup, key, cfg),
    )


def _stochastic(setup: _Setup, key: dict[str, Any], cfg: DictConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return LiSSA's and the SGD PBRF's scores over seeds, (S, M, K) each, and LiSSA's lengths, (S, K)."""
    key = key | dataclasses.asdict(setup.settings)
    lissa, pbrf, lengths = [], [], []
    for seed in range(cfg.num_seeds):
        found = setup.run.unit(
            "lissa/scores",
            key | {"repetition": seed},
            partial(_lissa, setup, seed),
            version=1,
            about=f"LiSSA {setup.task.label}, seed {seed}",
        )
        lissa.append(found["scores"].double())
        lengths.append(found["lengths"].double())
        responded = setup.run.unit(
            "pbrf/sgd",
            key | {"repetition": seed, "epsilon": cfg.pbrf.epsilon},
            partial(_pbrf_by_sgd, setup, cfg.pbrf.epsilon, seed),
            version=1,
            about=f"PBRF by SGD {setup.task.label}, seed {seed}",
            resumes=True,
        )
        pbrf.append(responded["scores"].double())
    return torch.stack(lissa), torch.stack(pbrf), torch.stack(lengths)


def _reference(setup: _Setup, key: dict[str, Any], cfg: DictConfig) -> dict[str, Any]:
    """Return what tells solver error from linearisation error, for the first `exact_points` points."""
    num_exact = min(cfg.exact_points, len(setup.points[1]))
    none = torch.zeros(len(setup.test[1]), 0, dtype=torch.float64)
    if num_exact == 0:
        residuals = {"cg": math.nan, "newton": math.nan}
        return {"cg": none, "exact": none, "lissa_auto": none, "constant": math.nan, "residuals": residuals}
    first = dataclasses.replace(setup, points=(setup.points[0][:num_exact], setup.points[1][:num_exact]))
    key = key | {"exact_points": num_exact}
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
    automatic: dict[str, Any] = {"scores": none, "constant": math.nan}
    if cfg.measure_constant:
        about = f"LiSSA {setup.task.label}, C measured"
        automatic = setup.run.unit("lissa/auto", key, partial(_lissa_auto, first), version=1, about=about)
    return {
        "cg": solved["scores"].double(),
        "exact": minimised["scores"].double(),
        "lissa_auto": automatic["scores"].double(),
        "constant": automatic["constant"],
        "residuals": {"cg": solved["residual"], "newton": minimised["residual"]},
    }


def _draw(size: int, wanted: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator)[: min(wanted, size)]


def _settings(cfg: DictConfig, spectrum: dict[str, float], damping: float) -> LissaHyperparameters:
    recipe = lissa_hyperparameters(
        trace=spectrum["trace"],
        largest_eigenvalue=spectrum["largest_eigenvalue"],
        damping=damping,
        constant=cfg.lissa.constant,
    )
    given = {name: cfg.lissa[name] for name in ("step_size", "batch_size", "num_steps")}
    return LissaHyperparameters(
        step_size=given["step_size"] or recipe.step_size,
        batch_size=given["batch_size"] or recipe.batch_size,
        num_steps=given["num_steps"] or recipe.num_steps,
    )


def _lissa(setup: _Setup, seed: int) -> dict[str, Any]:
    run, settings = setup.run, setup.settings
    gradients = setup.gradients()
    solver = Lissa(
        settings.step_size,
        settings.batch_size,
        settings.num_steps,
        check_residual=False,  # the comparison with CG says more, and costs no products of the full data
        raise_on_divergence=False,  # as in the paper, whose third case ("large and apart") this may be
        callback=_advance(run.progress(settings.num_steps, f"LiSSA {setup.task.label}, seed {seed}")),
    )
    operator = setup.damped
    solution = solver.solve(operator, gradients, generator=run.generator("lissa", setup.task.seed_name, seed))
    run.add_matvecs(solution.num_matvecs)
    # Relative to ‖g‖ / damping, which no solution of (G + damping) x = g exceeds.
    lengths = operator.norm(solution.x) * setup.damping / operator.norm(gradients)
    return {"scores": setup.influences(solution.x), "lengths": lengths}


def _lissa_auto(setup: _Setup) -> dict[str, Any]:
    """The run that explains a failure of the recipe: the same iteration with C measured."""
    run, task = setup.run, setup.task
    generator = run.generator("lissa_auto", task.seed_name)
    operator = GaussNewtonOperator(task.model, task.loss, task.train)
    solver = Lissa.auto(operator, setup.damping, generator=generator)
    bar = run.progress(solver.num_steps, f"LiSSA {task.label}, C measured")
    solver = dataclasses.replace(solver, check_residual=False, callback=_advance(bar))
    solution = solver.solve(setup.damped, setup.gradients(), generator=generator)
    run.add_matvecs(solution.num_matvecs)
    constant = solver.recipe.constant if solver.recipe else math.nan
    return {"scores": setup.influences(solution.x), "constant": constant, "batch_size": solver.batch_size}


def _pbrf_by_sgd(setup: _Setup, epsilon: float, seed: int, checkpoints: Path) -> dict[str, Any]:
    run, settings = setup.run, setup.settings
    bar = run.progress(settings.num_steps, f"PBRF by SGD {setup.task.label}, seed {seed}")
    optimizer = ProximalSGD(
        settings.step_size,
        settings.batch_size,
        settings.num_steps,
        callback=lambda step: bar.update(),
        checkpoint=checkpoints / "pbrf.pt",
    )
    generator = run.generator("pbrf", setup.task.seed_name, seed)
    response = optimizer.minimize(setup.objective(epsilon), generator=generator)
    return {"scores": setup.responses(response.displacement, epsilon)}


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


def _advance(bar: Any) -> Callable[[int, Tensor], None]:
    return lambda step, value: bar.update()
