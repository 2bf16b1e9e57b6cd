"""LiSSA and SGD on the proximal Bregman objective, on the same batches; and exact solutions of both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import example_importance
from curvlab.influence import ProximalBregmanObjective, ProximalNewton, directional_derivatives, loss_response
from curvlab.lab import Run, unit
from curvlab.linalg import LinearOperator
from curvlab.linalg.operator import DerivedOperator
from curvlab.solvers import BlockConjugateGradient, Lissa, LissaHyperparameters, lissa_hyperparameters
from curvlab.solvers.lissa import LissaState
from experiments.shared.spectrum import constants
from experiments.shared.systems import Systems

PARTED = 0.5  # of LiSSA's length: where SGD is farther than that from LiSSA, the two have parted


@dataclass(frozen=True)
class Paired:
    """Where both iterations end, and how they go there; u = -x to first order in ε, step by step.

    Attributes:
        solutions: (P, K) LiSSA's x.
        displacement: (P, K) SGD's u = (θ - θ*) / ε.
        lissa_norms: (T, K) ‖x_t‖, inf from where it is not finite.
        sgd_norms: (T, K) ‖u_t‖, likewise.
        distances: (T, K) ‖u_t + x_t‖, likewise.
    """

    solutions: Tensor
    displacement: Tensor
    lissa_norms: Tensor
    sgd_norms: Tensor
    distances: Tensor


class AllExamples(DerivedOperator):
    """An operator whose batches are all its examples: what LiSSA is where |B| would exceed N."""

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V."""
        return self.origin.matmat(vectors)

    # Without probabilities: nothing is drawn.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> AllExamples:
        """Return the operator itself; nothing is drawn."""
        return self

    @property
    def is_psd(self) -> bool:
        """As the operator's."""
        return self.origin.is_psd

    @property
    def damping(self) -> float:
        """As the operator's."""
        return self.origin.damping

    @property
    def num_examples(self) -> int | None:
        """As the operator's."""
        return self.origin.num_examples


class _Follower:
    """Plain SGD that takes one step for each of LiSSA's, and measures both."""

    def __init__(  # noqa: PLR0917
        self,
        objective: ProximalBregmanObjective,
        step_size: float,
        batch_size: int | None,
        probabilities: Tensor | None,
        generator: torch.Generator,
        on_step: Callable[[], None],
    ) -> None:
        self.probabilities = probabilities
        self.objective, self.step_size, self.batch_size = objective, step_size, batch_size
        self.generator, self.on_step = generator, on_step
        self.displacement = objective.zeros()
        self.norms: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, state: LissaState) -> None:
        u = self.displacement
        if self.batch_size is None:
            gradient = self.objective.gradient(u)
        else:
            gradient = self.objective.sampled_gradient(
                u, batch_size=self.batch_size, probabilities=self.probabilities, generator=self.generator
            )
        self.displacement = u - self.step_size * gradient
        x = state.x.to(self.displacement)
        found = (x, self.displacement, x + self.displacement)
        self.norms.append(tuple(_norms(vectors) for vectors in found))  # type: ignore[arg-type]
        self.on_step()


def run_paired(  # noqa: PLR0917
    objective: ProximalBregmanObjective,
    damped: LinearOperator,
    gradients: Tensor,
    settings: LissaHyperparameters,
    generators: tuple[torch.Generator, torch.Generator],
    on_step: Callable[[], None] = lambda: None,
    *,
    probabilities: Tensor | None = None,
) -> Paired:
    """Solve (G + damping) x = g by LiSSA and minimise the objective by SGD, with one step size, |B| and T.

    With |B| >= N every step of both takes all the data, and nothing is drawn, but by probabilities.

    Args:
        objective: of the K points; its damping and its data are those of `damped`.
        damped: G + damping I at θ*.
        gradients: (P, K) of the points' losses at θ*.
        settings: step size η, |B| and T of both.
        generators: LiSSA's and SGD's, in the same state: each draws the same indices, once for each step.
        on_step: called after each step of both.
        probabilities: by which both draw examples, (N,); None: uniformly.

    Cost: for each of the T steps a product for each point and 4F of |B| examples for each point, F a forward.
    """
    full = probabilities is None and settings.batch_size >= objective.num_examples
    size = None if full else settings.batch_size
    follower = _Follower(objective, settings.step_size, size, probabilities, generators[1], on_step)
    solver = Lissa(
        settings.step_size,
        settings.batch_size,
        settings.num_steps,
        check_residual=False,  # the comparison with CG says more, and costs no products of the full data
        raise_on_divergence=False,  # as in the paper, whose third case ("large and apart") this may be
        callback=follower,
        probabilities=probabilities,
    )
    solution = solver.solve(AllExamples(damped) if full else damped, gradients, generator=generators[0])
    norms = [torch.stack(rows) for rows in zip(*follower.norms, strict=True)]
    return Paired(solution.x, follower.displacement, *norms)


def parting_steps(lissa_norms: Tensor, distances: Tensor) -> Tensor:
    """Return the first step, from 1, at which SGD has parted from LiSSA, (T, K) each -> (K,); 0: never.

    Parted: ‖u_t + x_t‖ exceeds half of ‖x_t‖, or is not finite. On the same batches LiSSA is SGD's linearisation
    at θ*, so that it is SGD that has left the range of the quadratic approximation, or lost its digits.
    """
    parted = ~(distances <= PARTED * lissa_norms) | ~distances.isfinite()
    first = parted.to(torch.int8).argmax(0) + 1
    return torch.where(parted.any(0), first, torch.zeros_like(first))


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=0).nan_to_num(torch.inf, torch.inf)


# ------------------------------------------------------------------------------------ settings
def given_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings of LiSSA as the config has them, None where they follow from the spectrum."""
    return {name: cfg.lissa[name] for name in ("step_size", "batch_size", "num_steps")}


def assumed_settings(cfg: DictConfig, spectrum: dict[str, float], damping: float) -> LissaHyperparameters:
    """Return the settings of C = 2: as given, else those of Corollary 1 and Table 1."""
    given = {name: value for name, value in given_settings(cfg).items() if value is not None}
    if len(given) == 3:
        return LissaHyperparameters(**given)
    return dataclasses.replace(_recipe(spectrum, damping, cfg.lissa.constant), **given)


def measured_settings(
    cfg: DictConfig, spectrum: dict[str, float], damping: float, constant: float
) -> LissaHyperparameters:
    """Return the same with |B| >= C tr / (1 / step_size - damping), App. B.2, for C = `constant`.

    It is C tr / λmax for the step size of Corollary 1.
    """
    assumed, step_size = assumed_settings(cfg, spectrum, damping), cfg.lissa.step_size
    if step_size is None:
        return dataclasses.replace(assumed, batch_size=_recipe(spectrum, damping, constant).batch_size)
    if step_size * damping >= 1:
        raise ValueError(f"lissa.step_size must be below 1 / damping = {1 / damping:.3g}, got {step_size:.3g}")
    size = math.ceil(constant * spectrum["trace"] / (1 / step_size - damping))
    return dataclasses.replace(assumed, batch_size=size)


def _recipe(spectrum: dict[str, float], damping: float, constant: float) -> LissaHyperparameters:
    """Return the settings of Corollary 1 and Table 1, with C = `constant`."""
    largest = spectrum["largest_eigenvalue"]
    return lissa_hyperparameters(
        trace=spectrum["trace"], largest_eigenvalue=largest, damping=damping, constant=constant
    )


# ------------------------------------------------------------------------------------ units of work
@dataclass(frozen=True)
class Pairs:
    """LiSSA and the PBRF by SGD with one choice of batches, a run of both for each seed, on the same batches.

    Attributes:
        settings: step size, batch size and steps of both.
        constant: C in |B| = C tr / lambda_max; nan where |B| was given.
        lissa: (seeds, M, K') influence by LiSSA, of the first K' points; one seed where |B| >= N, nothing drawn.
        pbrf: (seeds, M, K') response of the test losses by SGD.
        lissa_lengths: (seeds, T, K') ‖x_t‖ damping / ‖g‖: above 1 it is no solution.
        sgd_lengths: (seeds, T, K') the same of SGD's displacement over epsilon.
        distances: (seeds, T, K') the same of the difference between the two.
    """

    settings: LissaHyperparameters
    constant: float
    lissa: Tensor
    pbrf: Tensor
    lissa_lengths: Tensor
    sgd_lengths: Tensor
    distances: Tensor

    @property
    def parted(self) -> Tensor:
        """First step, from 1, at which SGD of each seed has parted from LiSSA, (seeds, K'); 0: never."""
        return parting_steps(self.lissa_lengths.transpose(0, 1), self.distances.transpose(0, 1))


def first_points(systems: Systems, count: int | None) -> Systems:
    """Return the systems of the first so many points; None: of all."""
    inputs, targets = systems.sources
    return dataclasses.replace(systems, sources=(inputs[:count], targets[:count]))


def pairs_by_choice(systems: Systems, cfg: DictConfig, spectrum: dict[str, float]) -> dict[str, Pairs]:
    """Return LiSSA and SGD by choice: "" (C = 2), "measured_", "importance_", and "larger" (epsilon).

    The last three are of the first so many points, and left out where these are 0.
    """
    task, settings = systems.task, assumed_settings(cfg, spectrum, systems.damping)
    shared = {"epsilon": cfg.pbrf.epsilon, "num_seeds": cfg.num_seeds}
    shared |= {"constant": cfg.lissa.constant if cfg.lissa.batch_size is None else math.nan}
    found = {"": paired_runs(systems, settings, **shared)}
    if cfg.measured.points != 0:
        # What is measured is a lower bound of the constant needed.
        largest = constants(task, **cfg.constant, trace=spectrum["trace"])["largest"]
        constant = cfg.measured.safety * max(1.0, largest)
        own = measured_settings(cfg, spectrum, systems.damping, constant)
        first = first_points(systems, cfg.measured.points)
        found["measured_"] = paired_runs(first, own, **shared | {"constant": constant})
    if cfg.importance.points != 0:
        probabilities = _importance(task.run, systems, **task.key)["probabilities"]
        first = first_points(systems, cfg.importance.points)
        found["importance_"] = paired_runs(first, settings, **shared, probabilities=probabilities)
    if cfg.larger.points != 0:
        first = first_points(systems, cfg.larger.points)
        found["larger"] = paired_runs(first, settings, **shared | {"epsilon": float(cfg.larger.epsilon)})
    return found


def paired_runs(
    systems: Systems,
    settings: LissaHyperparameters,
    *,
    constant: float,
    epsilon: float,
    num_seeds: int,
    probabilities: Tensor | None = None,
) -> Pairs:
    """Return LiSSA and SGD of every seed, a unit of work each; `probabilities`: of drawing the examples."""
    key = systems.key | dataclasses.asdict(settings) | {"epsilon": epsilon}
    key |= {} if probabilities is None else {"sampling": "importance"}
    full = probabilities is None and settings.batch_size >= systems.task.num_train
    objective = cache(partial(_objective, systems, epsilon))  # one for all seeds, where one is computed
    found = [
        _paired(systems.task.run, systems, settings, probabilities, objective, **key, repetition=seed)
        for seed in range(1 if full else num_seeds)
    ]
    names = ("lissa", "pbrf", "lissa_lengths", "sgd_lengths", "distances")
    return Pairs(settings, constant, *(torch.stack([one[name].double() for one in found]) for name in names))


@unit("lissa/paired", version=1, about="LiSSA and SGD, |B| = {batch_size}, seed {repetition}, epsilon {epsilon:g}")
def _paired(
    run: Run, systems: Systems, settings: LissaHyperparameters, probabilities: Tensor | None,
    objective: Callable[[], ProximalBregmanObjective], /, *, epsilon: float, repetition: int, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    task, gradients = systems.task, systems.right_hand_sides
    about = f"LiSSA and SGD {task.label}, |B| = {settings.batch_size}, seed {repetition}"
    bar = run.progress(settings.num_steps, about)
    generators = (task.generator("batches", repetition), task.generator("batches", repetition))
    found = run_paired(
        objective(), systems.damped, gradients, settings, generators, bar.update, probabilities=probabilities
    )
    run.add_matvecs(settings.num_steps * gradients.shape[1])
    # Relative to ‖g‖ / damping, which no solution of (G + damping) x = g exceeds.
    scale = systems.damping / torch.linalg.vector_norm(gradients.double(), dim=0)
    return {
        "lissa": _influences(systems, found.solutions),
        "pbrf": loss_response(task.model, task.loss, systems.tests, found.displacement, epsilon=epsilon),
        "lissa_lengths": found.lissa_norms * scale,
        "sgd_lengths": found.sgd_norms * scale,
        "distances": found.distances * scale,
    }


def _objective(systems: Systems, epsilon: float | Tensor) -> ProximalBregmanObjective:
    task = systems.task
    return ProximalBregmanObjective(
        task.model, task.loss, task.train, candidates=systems.sources, damping=systems.damping, epsilon=epsilon
    )


def _influences(systems: Systems, solutions: Tensor) -> Tensor:
    """Return -∇l(test)ᵀ x for each solution x, (P, K) -> (M, K)."""
    return -directional_derivatives(systems.task.model, systems.task.loss, systems.tests, solutions)


@unit("lissa/example_importance", version=1)
def _importance(run: Run, systems: Systems, /, **_: Any) -> dict[str, Any]:
    """Return `probabilities` of the examples, proportional to tr(G_i)."""
    found = example_importance(systems.operator, generator=systems.task.generator("importance"))
    run.add_matvecs(found.num_matvecs)
    return {"probabilities": found.probabilities}


def solved_exactly(systems: Systems, cfg: DictConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return `cg` and `exact`, (M, K'') for the first `exact_points` points, and their residuals.

    Influence by conjugate gradients, the response by Newton's method: solver error apart from linearisation error.
    """
    count = min(cfg.exact_points, len(systems.sources[1]))
    scores = dict.fromkeys(("cg", "exact"), torch.zeros(len(systems.tests[1]), 0, dtype=torch.float64))
    residuals = {"CG residual": math.nan, "PBRF gradient norm": math.nan}
    first, key = first_points(systems, count), systems.key | {"exact_points": count}
    if count > 0:
        found = _by_cg(systems.task.run, first, **key, rtol=cfg.exact.cg_rtol)
        scores["cg"], residuals["CG residual"] = found["scores"].double(), found["residual"]
    if count > 0 and cfg.exact.pbrf:
        accuracy = {"rtol": cfg.exact.newton_rtol, "displacement": cfg.exact.displacement}
        found = _by_newton(systems.task.run, first, cfg.exact.newton_steps, **key, **accuracy)
        scores["exact"], residuals["PBRF gradient norm"] = found["scores"].double(), found["residual"]
    return scores, residuals


@unit("influence/cg", version=1, about="CG, {exact_points} points")
def _by_cg(run: Run, systems: Systems, /, *, rtol: float, **_: Any) -> dict[str, Any]:
    """Return `scores` of the exact solutions, and the largest relative `residual`."""
    bar = run.progress(0, f"CG {systems.task.label}")
    solver = BlockConjugateGradient(rtol, callback=lambda _: bar.update())
    solution = solver.solve(systems.damped, systems.right_hand_sides)
    run.add_matvecs(solution.num_matvecs)
    return {"scores": _influences(systems, solution.x), "residual": float(solution.residual.max())}


@unit("pbrf/newton", version=1, about="exact PBRF, {exact_points} points")
def _by_newton(
    run: Run, systems: Systems, max_steps: int, /, *, rtol: float, displacement: float, **_: Any
) -> dict[str, Any]:
    """Return `scores` of the objective minimised by Newton's method, and the largest gradient norm, `residual`."""
    bar = run.progress(0, f"exact PBRF {systems.task.label}")
    inner = BlockConjugateGradient(rtol=1e-3, max_steps=500, callback=lambda _: bar.update())
    # ‖θ(ε) - θ*‖ <= ε‖∇l‖ / damping to first order: this ε bounds it, alike for fitted and badly fitted points.
    norms = torch.linalg.vector_norm(systems.right_hand_sides.double(), dim=0)
    epsilon = displacement * systems.damping / norms.clamp(min=torch.finfo(torch.float32).tiny)
    objective = _objective(systems, epsilon)
    response = ProximalNewton(rtol=rtol, max_steps=max_steps, solver=inner).minimize(objective)
    run.add_matvecs(response.num_matvecs)
    task = systems.task
    scores = loss_response(task.model, task.loss, systems.tests, response.displacement, epsilon=epsilon)
    return {"scores": scores, "residual": float(response.gradient_norm.max())}
