"""The solvers that are compared, each with its set-up, and what it paid by when: products and seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab import solvers
from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import LinearOperator, identity
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.benchmarks.solvers.chebyshev import Chebyshev
from experiments.shared.stats import column_correlations
from experiments.shared.systems import Systems

GROWTH = 1.25  # between steps at which the iterate is looked at
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


# ------------------------------------------------------------------------------------ counting
@dataclass
class Counter:
    """Work so far, one unit for each product of one vector with the matrix of the whole data."""

    work: float = 0.0


class CountedOperator(LinearOperator):
    """A curvature matrix that counts its products, and those of its batches by their share of the data."""

    def __init__(self, operator: GaussNewtonOperator, counter: Counter, *, weight: float = 1.0) -> None:
        super().__init__(operator.shape[0], dtype=operator.dtype, device=operator.device)
        self.operator, self.counter, self.weight = operator, counter, weight

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V."""
        self.counter.work += self.weight * vectors.shape[1]
        return self.operator.matmat(vectors)

    # Batches are uniform here.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> CountedOperator:
        """Return a batch, whose products count batch_size / N."""
        weight = batch_size / self.operator.num_examples
        return CountedOperator(self.operator.sample(batch_size, generator), self.counter, weight=weight)

    @property
    def is_psd(self) -> bool:
        """As the operator counted."""
        return self.operator.is_psd


@dataclass
class Recorder:
    """Compares iterates with the reference at steps 1, 2, 3, ..., growing by a quarter; that time is not counted.

    Attributes:
        counter: of the products.
        reference: (P, R), solutions of the first R systems.
        point_gradients: (M, P), of training losses; products with a solution are influence scores, up to sign.
    """

    counter: Counter
    reference: Tensor
    point_gradients: Tensor
    clock: Callable[[], float]
    rows: list[dict[str, float | Tensor]] = field(default_factory=list)
    _next: float = 1.0
    _paused: float = 0.0
    _start: float = field(default=math.nan)

    def start(self) -> None:
        """Begin to count seconds."""
        self._start = self.clock()

    def __call__(self, state: Any) -> None:
        """Look at the iterate if it is time."""
        if (step := state.num_steps) < self._next:
            return
        self._next = max(step + 1, step * GROWTH)
        self.record(state.x)

    def record(self, x: Tensor) -> None:
        """Add a row: work, seconds, error and correlation of each system."""
        now = self.clock()
        row: dict[str, float | Tensor] = {"work": self.counter.work, "seconds": now - self._start - self._paused}
        x = x[:, : self.reference.shape[1]].to(self.reference)
        reference = self.reference[:, : x.shape[1]]
        row["errors"] = (x - reference).norm(dim=0) / reference.norm(dim=0)
        row["correlations"] = column_correlations(self.point_gradients @ x, self.point_gradients @ reference)
        self.rows.append(row)
        self._paused += self.clock() - now


# ------------------------------------------------------------------------------------ solving
@dataclass(frozen=True)
class CountedSystems:
    """(G + damping I) X = B, and who watches one method solve it.

    Attributes:
        systems: operator and damping.
        right_hand_sides: B, (P, K).
        recorder: of one method's run.
        rtol: residual that ends it.
        nystrom_rank: of the preconditioner.
    """

    systems: Systems
    right_hand_sides: Tensor
    recorder: Recorder
    rtol: float
    nystrom_rank: int

    @property
    def operator(self) -> CountedOperator:
        """G, whose products are counted."""
        return CountedOperator(self.systems.operator, self.recorder.counter)  # type: ignore[arg-type]  # Gauss-Newton

    def inverse(self, preconditioner: solvers.Rows | solvers.Ekfac, generator: torch.Generator) -> LinearOperator:
        """Return the built preconditioner; it reads the model's layers, so what it costs is added by hand."""
        inverse, cost = preconditioner.build(self.systems.damped, generator=generator)
        self.recorder.counter.work += cost
        return inverse


def solve(counted: CountedSystems, method: str, generator: torch.Generator) -> dict[str, object]:
    """Run a method from its set-up to its residual; return its outcome in words and its largest residual."""
    recorder = counted.recorder
    recorder.start()
    solver = _lissa(counted, method, generator) if "lissa" in method else _solver(counted, method, generator)
    try:
        damped = counted.operator + counted.systems.damping * identity
        solution = solver.solve(damped, counted.right_hand_sides, generator=generator)
    except solvers.DivergenceError as error:
        return {"outcome": f"diverges at step {error.step}", "residual": math.inf}
    recorder.record(solution.x)
    outcome = "converged" if solution.converged else "not converged"
    if isinstance(solver, solvers.Lissa):  # its tolerance for the residual says little about scores
        outcome = f"all {solver.num_steps} steps"
    return {"outcome": outcome, "residual": float(solution.residual.max())}


def _solver(counted: CountedSystems, method: str, generator: torch.Generator) -> solvers.Solver:
    recorder, rtol, rank = counted.recorder, counted.rtol, counted.nystrom_rank
    size, num = counted.right_hand_sides.shape
    if method == "cg":
        return solvers.ConjugateGradient(rtol, callback=recorder)
    if method == "block_cg":
        return solvers.BlockConjugateGradient(rtol, callback=recorder)
    if method == "chebyshev":
        return Chebyshev(rtol, callback=recorder)
    if method == "nystrom_cg":
        return solvers.ConjugateGradient(rtol, preconditioner=solvers.Nystrom(rank), callback=recorder)
    if method == "ekfac_cg":
        return solvers.ConjugateGradient(
            rtol, preconditioner=counted.inverse(solvers.Ekfac(), generator), callback=recorder
        )
    if method == "nystrom_block_cg":
        return dataclasses.replace(solvers.default_solver(size, num, rtol=rtol), callback=recorder)
    # What `influence` takes by default: it looks at the examples' curvature, which costs four forwards.
    chosen = solvers.default_solver(size, num, rtol=rtol, operator=counted.systems.damped)
    recorder.counter.work += 0.8
    if isinstance(chosen.preconditioner, solvers.Rows):
        inverse = counted.inverse(chosen.preconditioner, generator)
        chosen = dataclasses.replace(chosen, preconditioner=inverse)
    return dataclasses.replace(chosen, callback=recorder)


def _lissa(counted: CountedSystems, method: str, generator: torch.Generator) -> solvers.Lissa:
    operator, damping = counted.operator, counted.systems.damping
    if method == "lissa_auto":
        solver = solvers.Lissa.from_recipe(solvers.measure_recipe(operator, damping, generator=generator))
        return dataclasses.replace(solver, callback=counted.recorder)
    trace = hutchinson_trace(operator, rtol=0.05, generator=generator).value
    largest = float(top_eigenvalues(operator, 1, rtol=0.01, generator=generator).values[0])
    settings = solvers.lissa_hyperparameters(
        trace=max(trace, largest), largest_eigenvalue=largest, damping=damping
    )
    batch_size = math.ceil(settings.batch_size / counted.systems.task.predictions_per_example)
    return solvers.Lissa(settings.step_size, batch_size, settings.num_steps, callback=counted.recorder)
