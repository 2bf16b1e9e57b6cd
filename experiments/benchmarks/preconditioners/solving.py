"""Products and seconds to a residual, with each preconditioner."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Nystrom, Preconditioner, Rows
from experiments.benchmarks.gauges import work_clock
from experiments.benchmarks.preconditioners.systems import Systems

TARGETS = (1e-1, 1e-2, 1e-3)  # residuals
WITHOUT = "none"


def preconditioners(systems: Systems) -> dict[str, Preconditioner | None]:
    """Return every preconditioner of the settings by its label."""
    settings = systems.settings
    found: dict[str, Preconditioner | None] = {WITHOUT: None}
    found |= {f"Nyström {rank}": Nystrom(rank) for rank in settings.nystrom_ranks}
    for own in settings.rows:
        label = f"{own.num_rows} rows" + (f" to {own.rank}" if own.rank else "")
        label += {"outputs": "", "traces": ", by traces"}[own.score]
        found[label] = Rows(own.num_rows, rank=own.rank, score=own.score)
    return found


def solving_rows(systems: Systems) -> list[dict[str, Any]]:
    """Return one row for each preconditioner and residual, and for the peers."""
    rows: list[dict[str, Any]] = []
    for label, preconditioner in preconditioners(systems).items():
        rows += _unit(systems, label, partial(_block_cg, systems, preconditioner))
    rows += _unit(systems, "CG", partial(_cg, systems))
    options = systems.settings.curvlinops
    if options is not None:
        rows += _unit(systems, "curvlinops CG", partial(_curvlinops, systems, options.max_iter, options.tolerance))
    return rows


def _unit(systems: Systems, label: str, compute: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    about = f"{label} on {systems.task.label}"
    key = systems.key | {"label": label}
    found = systems.run.unit("preconditioners/solve", key, compute, version=1, about=about)
    shared = {"task": systems.task.label, "preconditioner": label}
    return [
        shared | {"target": target, "products": products, "seconds": seconds, "residual": found["residual"]}
        for target, products, seconds in zip(TARGETS, found["products"], found["seconds"], strict=True)
    ]


class _Clock:
    """When, and after how many steps, residuals were first reached."""

    def __init__(self, systems: Systems) -> None:
        self.now = work_clock(systems.run.device)
        self.start = self.now()
        self.steps, self.seconds = [math.nan] * len(TARGETS), [math.nan] * len(TARGETS)

    def __call__(self, state: Any) -> None:
        worst = float(state.relative_residuals.max())
        for index, target in enumerate(TARGETS):
            if worst <= target and math.isnan(self.steps[index]):
                self.steps[index], self.seconds[index] = state.num_steps, self.now() - self.start


def _block_cg(systems: Systems, preconditioner: Preconditioner | None) -> dict[str, Any]:
    b = systems.right_hand_sides
    systems.operator @ b[:, :2]  # what PyTorch loads for a first product is no preconditioner's
    generator = systems.run.generator("preconditioners", systems.task.seed_name)
    clock, set_up, inverse = _Clock(systems), 0, None
    if preconditioner is not None:
        inverse, set_up = preconditioner.build(systems.damped, generator=generator)
    solver = BlockConjugateGradient(0.9 * TARGETS[-1], preconditioner=inverse, callback=clock)
    solution = solver.solve(systems.damped, b)
    systems.run.add_matvecs(solution.num_matvecs + set_up)
    # One product more a system where a residual is recomputed before it is believed, as every solve ends.
    products = [step + 1 + set_up / b.shape[1] for step in clock.steps]
    seconds = [value / b.shape[1] for value in clock.seconds]
    return {"products": products, "seconds": seconds, "residual": float(solution.residual.max())}


def _cg(systems: Systems) -> dict[str, Any]:
    """Conjugate gradients for each system by itself, no preconditioner: products are a mean over systems."""
    b = systems.right_hand_sides[:, : systems.settings.num_cg]
    first = torch.full((len(TARGETS), b.shape[1]), math.nan)
    clock = _Clock(systems)

    def watch(state: Any) -> None:
        clock(state)
        for index, target in enumerate(TARGETS):
            reached = (state.relative_residuals <= target) & first[index].isnan()
            first[index, reached] = state.num_steps

    solution = ConjugateGradient(0.9 * TARGETS[-1], callback=watch).solve(systems.damped, b)
    systems.run.add_matvecs(solution.num_matvecs)
    seconds = [value / b.shape[1] for value in clock.seconds]
    return {
        "products": (first.mean(1) + 1).tolist(),
        "seconds": seconds,
        "residual": float(solution.residual.max()),
    }


def _curvlinops(systems: Systems, max_iter: int, tolerance: float) -> dict[str, Any]:
    """The peer's CG; it tells no residual, so that is computed afterwards."""
    nothing = {"products": [math.nan] * len(TARGETS), "seconds": [math.nan] * len(TARGETS), "residual": math.nan}
    if importlib.util.find_spec("curvlinops") is None:
        return nothing
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    model, b = systems.task.model, systems.right_hand_sides[:, : systems.settings.num_cg]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = [(inputs, targets) for inputs, targets in systems.operator.batches]
    matrix = GGNLinearOperator(model, systems.task.loss, parameters, data, check_deterministic=False)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    unit = IdentityLinearOperator(shapes, parameters[0].device, parameters[0].dtype)
    clock = work_clock(systems.run.device)
    start = clock()
    inverse = CGInverseLinearOperator(matrix + systems.damping * unit, max_iter=max_iter, tolerance=tolerance)
    x = (inverse @ b).detach()
    seconds = (clock() - start) / b.shape[1]
    residual = float(((systems.damped @ x - b).norm(dim=0) / b.norm(dim=0)).max())
    reached = [seconds if residual <= target else math.nan for target in TARGETS]
    return {"products": [math.nan] * len(TARGETS), "seconds": reached, "residual": residual}
