"""The solvers that are compared, each with its set-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    DivergenceError,
    Ekfac,
    Lissa,
    Nystrom,
    Rows,
    Solver,
    default_solver,
    lissa_hyperparameters,
)
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.benchmarks.solvers.chebyshev import Chebyshev
from experiments.benchmarks.solvers.counting import CountedOperator, Counter, Recorder

LABELS = {
    "lissa_recipe": "LiSSA, C = 2",
    "lissa_auto": "Lissa.auto",
    "chebyshev": "Chebyshev",
    "cg": "CG",
    "ekfac_cg": "CG, EK-FAC",
    "nystrom_cg": "CG, Nyström",
    "block_cg": "block CG",
    "nystrom_block_cg": "block CG, Nyström",
    "default": "default",
}
# Systems are solved independently of one another, but for a set-up of a few products: the work for each does not
# depend on how many there are.
INDEPENDENT = ("lissa_recipe", "lissa_auto", "chebyshev", "cg", "ekfac_cg")


@dataclass(frozen=True)
class CountedSystems:
    """(G + damping I) X = B with what the answers are compared to.

    Attributes:
        operator: G.
        damping: added to it.
        right_hand_sides: B, (P, K).
        recorder: of one method's run.
        rtol: residual that ends it.
        nystrom_rank: of the preconditioner.
        predictions: of one example; tokens of a sequence.
    """

    operator: GaussNewtonOperator
    damping: float
    right_hand_sides: Tensor
    recorder: Recorder
    rtol: float
    nystrom_rank: int
    predictions: float

    @property
    def counted(self) -> LinearOperator:
        """G + damping I, whose products are counted."""
        return CountedOperator(self.operator, self.counter) + self.damping * identity

    @property
    def counter(self) -> Counter:
        """Of the products."""
        return self.recorder.counter


def solve(systems: CountedSystems, method: str, generator: torch.Generator) -> dict[str, object]:
    """Run a method from its set-up to its residual; return its outcome in words and its largest residual."""
    systems.recorder.start()
    if method.startswith("lissa"):
        return _lissa(systems, method, generator)
    solver = _solver(systems, method, generator)
    solution = solver.solve(systems.counted, systems.right_hand_sides, generator=generator)
    systems.recorder.record(solution.x)
    outcome = "converged" if solution.converged else "not converged"
    return {"outcome": outcome, "residual": float(solution.residual.max())}


def _solver(systems: CountedSystems, method: str, generator: torch.Generator) -> Solver:
    recorder, rtol, rank = systems.recorder, systems.rtol, systems.nystrom_rank
    size, num = systems.right_hand_sides.shape
    build: dict[str, Callable[[], Solver]] = {
        "cg": lambda: ConjugateGradient(rtol, callback=recorder),
        "block_cg": lambda: BlockConjugateGradient(rtol, callback=recorder),
        "chebyshev": lambda: Chebyshev(rtol, callback=recorder),
        "nystrom_cg": lambda: ConjugateGradient(rtol, preconditioner=Nystrom(rank), callback=recorder),
        "nystrom_block_cg": lambda: dataclasses.replace(default_solver(size, num, rtol=rtol), callback=recorder),
        "default": lambda: _default(systems, generator),
        "ekfac_cg": lambda: ConjugateGradient(rtol, preconditioner=_ekfac(systems, generator), callback=recorder),
    }
    return build[method]()


def _default(systems: CountedSystems, generator: torch.Generator) -> BlockConjugateGradient:
    """What `influence` takes: it looks at the examples' curvature, which costs a forward."""
    size, num = systems.right_hand_sides.shape
    damped = systems.operator + systems.damping * identity
    chosen = default_solver(size, num, rtol=systems.rtol, operator=damped)
    systems.counter.work += 0.2
    if isinstance(chosen.preconditioner, Rows):  # reads the model's layers, as EK-FAC does
        inverse, cost = chosen.preconditioner.build(damped, generator=generator)
        systems.counter.work += cost
        chosen = dataclasses.replace(chosen, preconditioner=inverse)
    return dataclasses.replace(chosen, callback=systems.recorder)


def _ekfac(systems: CountedSystems, generator: torch.Generator) -> LinearOperator:
    # It reads the model's layers, so it gets the operator itself; what it costs is added by hand.
    inverse, cost = Ekfac().build(systems.operator + systems.damping * identity, generator=generator)
    systems.counter.work += cost
    return inverse


def _lissa(systems: CountedSystems, method: str, generator: torch.Generator) -> dict[str, object]:
    counted = CountedOperator(systems.operator, systems.counter)

    if method == "lissa_auto":
        solver = Lissa.auto(counted, systems.damping, sampling="uniform", generator=generator)
        solver = dataclasses.replace(solver, callback=systems.recorder)
    else:
        trace = hutchinson_trace(counted, rtol=0.05, generator=generator).value
        largest = float(top_eigenvalues(counted, 1, rtol=0.01, generator=generator).values[0])
        settings = lissa_hyperparameters(
            trace=max(trace, largest), largest_eigenvalue=largest, damping=systems.damping
        )
        batch_size = math.ceil(settings.batch_size / systems.predictions)
        solver = Lissa(settings.step_size, batch_size, settings.num_steps, callback=systems.recorder)
    try:
        solution = solver.solve(systems.counted, systems.right_hand_sides, generator=generator)
    except DivergenceError as error:
        return {"outcome": f"diverges at step {error.step}", "residual": float("inf")}
    systems.recorder.record(solution.x)
    # Its tolerance for the residual says little about scores, so that is not its outcome here.
    return {"outcome": f"all {solver.num_steps} steps", "residual": float(solution.residual.max())}
