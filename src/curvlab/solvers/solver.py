"""The interface of a solver, what solvers that take steps have in common, and the checks of their input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlab.arguments import real, whole
from curvlab.iterate import Checkpoint, Method, State, iterate
from curvlab.linalg import LinearOperator, checked_operator, describe
from curvlab.seeding import Seed
from curvlab.solvers.solution import Solution

S = TypeVar("S", bound=State)
_PROBES, _EXAMPLES = 4, 64  # of the trace, for a forecast


class Solver(Protocol):
    """Anything that approximates x = A⁻¹ b. Damping belongs to A: pass `op + damping * identity`."""

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Solve for b, (P,) or (P, K). Deterministic solvers accept the generator and ignore it."""
        ...


def checked_solver(solver: Solver) -> Solver:
    """Return the solver, or raise a TypeError where it is none."""
    if isinstance(solver, type) or not hasattr(solver, "solve"):
        raise TypeError(
            f"solver must be one of curvlab.solvers, such as ConjugateGradient(rtol=1e-2), got {solver!r}"
        )
    return solver


@dataclass(frozen=True, kw_only=True)
class IterativeSolver:
    """What every solver that takes steps is told beside its settings, see `curvlab.iterate.iterate`.

    Args:
        callback: called after each step with its state: `num_steps`, `x` (P, K), the iterate, and, of solvers that
            know them, `relative_residuals` (K,). Neither is to be modified; `x` may be computed when it is read.
        checkpoint: file in which the state is kept; a preconditioner is built anew.
        progress: show a bar; a text is its name.
    """

    callback: Callable[[Any], object] | None = field(default=None, repr=False, compare=False)
    checkpoint: str | Path | Checkpoint | None = field(default=None, repr=False, compare=False)
    progress: bool | str = field(default=True, repr=False, compare=False)

    def settings(self) -> dict[str, Any]:
        """Return the settings that numbers depend on."""
        others = [each.name for each in fields(IterativeSolver)]
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}

    def depends_on(self) -> dict[str, Any]:
        """Return the same: what tells a solver from another where a longer method has it."""
        return self.settings()

    def run(self, method: Method[S, Solution], total: int | None = None) -> Solution:
        """Take the method's steps."""
        return iterate(
            method,
            name=type(self).__name__,
            total=total,
            progress=self.progress,
            callback=self.callback,
            checkpoint=self.checkpoint,
        )


@dataclass(frozen=True)
class ResidualSolver(IterativeSolver):
    """A solver that ends at a relative residual, or after a number of steps."""

    rtol: float = 1e-2
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_stopping(self.rtol, self.max_steps)


class ResidualState:
    """Base of the states of methods that end at a relative residual: what a bar shows.

    Attributes:
        relative_residuals: (K,), as the method knows them.
    """

    relative_residuals: Tensor

    @property
    def status(self) -> str:
        """The largest residual."""
        return f"residual {float(self.relative_residuals.max()):.2g}"


class ResidualMethod:
    """Base of methods that end at a relative residual: how many steps they will take, for `iterate`.

    Attributes:
        operator: the matrix A.
        solver: settings, with `rtol` and perhaps a `preconditioner`.
        sides: (P, K) right-hand sides.
        together: whether all columns have one recurrence, as in block methods.
    """

    operator: LinearOperator
    solver: Any
    sides: Tensor
    together = True

    @cached_property
    def _foreseen(self) -> float | None:
        number, inverse = self.sides.shape[1], getattr(self.solver, "preconditioner", None)
        blocks = 1 if self.together else number
        return foreseen_columns(self.operator, number, self.solver.rtol, inverse, blocks=blocks)

    def foreseen(self, columns: int) -> float | None:
        """Return how many steps of so many columns there will be; None where nobody can tell."""
        return self._foreseen and self._foreseen / columns

    def expected_steps(self, state: Any) -> float | None:
        """Return how many steps there will be, as foreseen, or as the residuals have fallen so far."""
        return self.foreseen(self.sides.shape[1]) or expected_steps(state.history, self.solver.rtol)


def expected_steps(history: Sequence[Tensor], rtol: float) -> float | None:
    """Return after how many steps the worst residual meets `rtol` if it falls on as before; None: it does not.

    For a forecast of the time, no more: conjugate gradients do not fall evenly.
    """
    last = float(history[-1].max()) if history else math.nan  # before the first step it was 1
    if not 0 < last < 1:
        return None
    return len(history) * max(1.0, math.log(rtol) / math.log(last))


def predicted_steps(excess: float, num_columns: int, rtol: float, *, num_known: int = 0) -> float:
    """Return how many steps block conjugate gradients take for K columns, from t = tr(G) / λ alone.

    With condition number κ the error falls by (√κ - 1) / (√κ + 1) a step. In s steps K columns find about K s
    directions, on average K s / 2, and no more than j eigenvalues of G can exceed tr(G) / j, so that
    κ = 1 + 2 t / (K s) is left: s solves s = ln(2 / rtol) / ln((√κ + 1) / (√κ - 1)). At least 1.

    M directions that a preconditioner knows are as good as found, κ = 1 + 2 t / (2 M + K s), with t what of tr(G)
    it leaves.

    Measured against predicted, 25 columns, rtol 1e-2: 27 and 42 on a fitted regression (Concrete), 11 and 14 on
    digits, 45 and 38 on 6,000 MNIST digits, 3 and 3 at λ = λmax. With 512, 1,024, 2,048 and 4,096 rows of a
    196-32-10 on 17,000 MNIST digits, 10 columns, λ = 1e-3, 14, 11, 8 and 6 steps against 12.7, 9.5, 6.3 and 4.0;
    without them 27 against 28.
    """
    low, high = 1.0, 1e5

    def needed(steps: float) -> float:
        return steps_at_condition(1 + 2 * excess / (2 * num_known + num_columns * steps), rtol)

    if needed(low) <= low:
        return low
    for _ in range(60):  # needed() falls with s: bisection
        middle = math.sqrt(low * high)
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return high


def steps_at_condition(condition: float, rtol: float) -> float:
    """Return how many steps conjugate gradients take at most to a residual of about rtol, given κ."""
    root = math.sqrt(condition)
    return math.log(2 / rtol) / math.log((root + 1) / (root - 1)) if root > 1 else 0.0


def foreseen_columns(
    operator: LinearOperator,
    num_columns: int,
    rtol: float,
    preconditioner: object = None,
    *,
    blocks: int = 1,
    beside: float = 0.0,
) -> float | None:
    """Return about how many columns conjugate gradients multiply by, set-up included; None where nobody can tell.

    For a forecast of the time: `predicted_steps` of tr(G) / λ, λ the damping, by a few vectors and examples.

    Args:
        operator: G + λ I.
        num_columns: K.
        rtol: residual to reach.
        preconditioner: directions that it knows shorten the solve.
        blocks: of columns that have a recurrence each.
        beside: damping that is not part of the operator.
    """
    damping = operator.damping + beside
    if damping <= 0:
        return None
    try:
        source = torch.Generator(operator.device).manual_seed(0)
        probes = operator.randn(_PROBES, source)
        products = operator.sample(min(_EXAMPLES, operator.num_examples or _EXAMPLES), source) @ probes
    except NotImplementedError:  # it has no data
        return None
    excess = float(operator.inner(probes, products - operator.damping * probes).mean()) / damping
    rows, rank = (getattr(preconditioner, name, None) or 0 for name in ("num_rows", "rank"))
    together = num_columns // blocks
    steps = predicted_steps(max(excess, 0.0), together, rtol, num_known=rows or rank)
    return float(rank + num_columns * (min(steps, operator.shape[0] / together) + 1))


class Preconditioner(Protocol):
    """A recipe; solvers follow it at each solve and count what it costs."""

    def build(self, operator: LinearOperator, *, generator: Seed = None) -> tuple[LinearOperator, int]:
        """Return a positive definite operator that approximates the inverse, and the products it took."""
        ...


def build_preconditioner(
    preconditioner: LinearOperator | Preconditioner | None,
    operator: LinearOperator,
    *,
    generator: torch.Generator | None = None,
) -> tuple[LinearOperator | None, int]:
    """Return the approximate inverse that a solver's `preconditioner` stands for, and the products it took."""
    if preconditioner is None or isinstance(preconditioner, LinearOperator):
        return preconditioner, 0
    if not hasattr(preconditioner, "build") or isinstance(preconditioner, type):
        raise TypeError(
            "preconditioner is an operator that approximates the inverse, or one of Nystrom(), EKFAC(), Rows(), "
            f"got {preconditioner!r}"
        )
    return preconditioner.build(operator, generator=generator)


def in_words(method: str, inverse: LinearOperator | None) -> str:
    """Return what a Solution says of how it was found."""
    return method if inverse is None else f"{method}, preconditioned by {inverse}"


class IndefiniteOperatorError(ValueError):
    """The operator is not, or not known to be, positive definite."""

    def __init__(self, operator: LinearOperator, reason: str) -> None:
        super().__init__(f"{describe(operator)} {reason}. {operator.way_out}")


def refuse_preconditioner(preconditioner: LinearOperator, what: str) -> None:
    """Raise the ValueError for a preconditioner that is not positive definite."""
    raise ValueError(
        f"the preconditioner {describe(preconditioner)} is not positive definite: {what} for a residual r. It "
        "must approximate the inverse of the operator, damping included."
    )


def check_stopping(rtol: float, max_steps: int | None) -> None:
    """Refuse a relative residual or a number of steps that no iteration could end at."""
    if not 0 < real("rtol", rtol) < 1:
        raise ValueError(f"rtol must be between 0 and 1, got {rtol}: it is ‖b - A x‖ / ‖b‖")
    if max_steps is not None:
        whole("max_steps", max_steps)


def step_limit(max_steps: int | None, operator: LinearOperator) -> int:
    """Return the most steps: 10 P, at most 5000, where nothing is asked for."""
    return max_steps if max_steps is not None else min(10 * operator.shape[0], 5000)


def check_right_hand_side(operator: LinearOperator, b: Tensor) -> Tensor:
    """Return b as (P, K), or raise a ValueError for a wrong length, dtype or device, or for NaN and inf."""
    checked_operator(operator).check_vectors(b)
    check_finite(b, "the right-hand side")
    if not bool(operator.norm(b).isfinite().all()):
        raise ValueError(
            f"the right-hand side's length overflows in {b.dtype}: use float32, as model.float(), or float64"
        )
    return b[:, None] if b.ndim == 1 else b


def check_definite(operator: LinearOperator) -> None:
    """Refuse an operator that is not known to be PSD and carries no damping."""
    if not operator.is_psd and operator.damping <= 0:
        raise IndefiniteOperatorError(
            operator, f"is not known to be positive semi-definite and has damping {operator.damping:g}"
        )


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise a ValueError when a tensor has NaN or inf in it."""
    if not bool(torch.isfinite(tensor).all()):
        columns = (~torch.isfinite(tensor.reshape(tensor.shape[0], -1)).all(0)).nonzero()[:, 0].tolist()
        raise ValueError(
            f"{name} is not finite (NaN or inf in column {', '.join(map(str, columns[:5]))}): check the model's "
            "parameters, outputs and gradients, or use float64."
        )


def depends_on(solver: IterativeSolver, operator: LinearOperator, b: Tensor, **others: Any) -> Mapping[str, Any]:
    """Return what a solution depends on: the system, the solver's settings, and what else it was given."""
    return {"operator": operator, "right-hand sides": b, **solver.settings(), **others}
