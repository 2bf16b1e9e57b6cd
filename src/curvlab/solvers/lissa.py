"""LiSSA: stochastic fixed-point iteration for inverse products."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvlab.arguments import not_negative, positive, whole
from curvlab.linalg import LinearOperator, describe, generator_for
from curvlab.progress import can_be_silent
from curvlab.seeding import Seed
from curvlab.solvers.lissa_settings import SAFETY, LissaRecipe, measure_recipe
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import IterativeSolver, check_definite, check_finite, check_right_hand_side, depends_on

_BUDGET = 10.0  # products that measuring C may cost
# Iterates this many times longer than any that a convergent iteration can reach have diverged. Sampling
# noise may exceed the bound, which holds for the mean, but not by much where the iteration is stable.
_NORM_MARGIN = 10.0


class DivergenceError(RuntimeError):
    """LiSSA's iterates grow without bound.

    Attributes:
        step: the step at which it was noticed.
        norm: largest ‖u‖ / ‖b‖ then.
        columns: the right-hand sides concerned.
    """

    def __init__(self, *, step: int, norm: float, columns: list[int], num_columns: int, advice: str) -> None:
        self.step, self.norm, self.columns = step, norm, columns
        which = "" if num_columns == 1 else f" in column {_listed(columns)} (of {num_columns})"
        super().__init__(f"LiSSA diverges: ‖u‖ / ‖b‖ reached {norm:.3g} at step {step}{which}. {advice}")


@dataclass(frozen=True)
class Lissa(IterativeSolver):
    """Solve A x = b by u <- u - step_size (A_t u - b), A_t = op.sample(batch_size): Agarwal et al. (2017).

    Klochkov & Liu (2024) Eq. 6 as printed, u <- b + (I - step_size A_t) u, has fixed point
    A⁻¹ b / step_size. This is the rescaled form given after their Eq. 8, whose limit does not depend on
    step_size. It starts at u = 0; Eq. 6 started at u = b, as usual, is this one step later. A includes the
    damping, `op + damping * identity`. All right-hand sides share the batches, so their errors are correlated.

    `lissa_hyperparameters` computes the three settings; the mean converges for step_size < 2 / λmax(A), the
    variance only if batch_size is large enough too.

    Args:
        step_size: η, at most 1 / (λmax + damping).
        batch_size: examples a step (sequences for language models), drawn with replacement.
        num_steps: T, about 2 / (step_size damping).
        rtol: `converged` means that the residual is at most this in every column. Sampling noise in the
            directions of large eigenvalues weighs heavily in the residual, so it may be missed although the
            influence scores are good: compare with ConjugateGradient.
        average_last: return the mean of that many last iterates instead of the last (Polyak & Juditsky 1992):
            takes away the noise in directions of large eigenvalues, which dominates the residual. 0 as in the
            paper. From 2 on `error` is estimated, from how far apart the means of the two halves are.
        error_rtol: where the error is estimated, `converged` if that is at most this in every column, whatever
            the residual. None: by the residual alone.
        max_steps: where the error is estimated and exceeds `error_rtol` after `num_steps`, go on to twice as many,
            and so on to this many, each time with the mean over the same share of the iterates. None: no further.
        check_residual: False skips the final product with the full operator: residual is then nan, and
            converged False because nothing is known.
        recipe: what the settings were computed from, if they were (`Lissa.auto`); its cost is counted.
        probabilities: by which a batch's examples are drawn, (N,), each then weighted to keep the mean, see
            `LinearOperator.sample`; None: uniformly. Where they follow tr(G_i), C is 1.
        raise_on_divergence: False returns what the iteration gives, as the authors' code does: only to show
            what that is. ‖x‖ > ‖b‖ / damping then tells that a column is no solution.
        callback, checkpoint, progress: see IterativeSolver; a checkpoint keeps the generator's state, too.

    Cost: num_steps sampled products a column, which are counted in `num_matvecs` as they are, though each
    touches batch_size examples only; plus one full product a column for the residual.
    """

    step_size: float
    batch_size: int
    num_steps: int
    rtol: float = 0.1
    average_last: int = 0
    error_rtol: float | None = None
    max_steps: int | None = None
    check_residual: bool = True
    recipe: LissaRecipe | None = None
    raise_on_divergence: bool = True
    probabilities: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        positive("step_size", self.step_size, "1 / (lambda_max + damping)")
        whole("batch_size", self.batch_size)
        whole("num_steps", self.num_steps)
        not_negative("rtol", self.rtol)
        whole("average_last", self.average_last, least=0)
        if self.error_rtol is not None:
            positive("error_rtol", self.error_rtol)
        if not 0 <= self.average_last <= self.num_steps:
            raise ValueError(
                f"average_last must be between 0 and num_steps = {self.num_steps}, got {self.average_last}"
            )
        if self.max_steps is not None and (
            whole("max_steps", self.max_steps) < self.num_steps or self.average_last < 2 or self.error_rtol is None
        ):
            raise ValueError(
                f"max_steps must be at least num_steps = {self.num_steps}, got {self.max_steps}; and going on is "
                "decided by the estimated error: give error_rtol, and average_last of 2 or more"
            )

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x ≈ A⁻¹ b for b (P,) or (P, K); raises DivergenceError rather than return garbage."""
        generator = generator_for(operator, generator)
        check_right_hand_side(operator, b)
        check_definite(operator)
        return self.run(_Iteration(self, operator, b, generator), self.num_steps)

    def sample(self, operator: LinearOperator, generator: torch.Generator | None) -> LinearOperator:
        """Return the operator on a batch, as the iteration draws it."""
        if self.probabilities is None:  # operators of users may know uniform batches alone
            return operator.sample(self.batch_size, generator)
        return operator.sample(self.batch_size, generator, self.probabilities)

    @classmethod
    @can_be_silent
    def auto(
        cls,
        operator: LinearOperator,
        damping: float,
        *,
        sampling: Literal["importance", "uniform"] = "importance",
        error_rtol: float = 0.2,
        progress: bool = True,
        callback: Callable[[LissaState], object] | None = None,
        generator: Seed = None,
    ) -> Lissa:
        """Return a solver for `operator + damping * identity` with settings measured on `operator`.

        λmax is measured, |B| = 2 C tr / λmax, four time constants are run, and the last third of the iterates is
        averaged. Where the estimated error of a solution then exceeds `error_rtol`, the iteration goes on until it
        does not (`max_steps`). `recipe` on the result says what was measured and what it cost; its products are
        counted in each solution. Where `error_rtol` is out of reach, a batch as dear as the data, or conjugate
        gradients take fewer products, a warning and `recipe.problems` say so before anything is run.

        Convergence of the second moment takes |B| >= C tr / λmax, where E H̃² - G² ⪯ C tr(G) G for the matrix H̃
        of one drawn example (Klochkov & Liu 2024, condition C.1, Corollary 1). Which C that is, is the sampling's:

        "importance": examples are drawn with q_i ∝ max(tr(G_i), 0.01 mean) and weighted by 1 / (N q_i). Then
        C <= 1.01 for exact traces, by proof: G_i² ⪯ tr(G_i) G_i, so E H̃² = Σ q_i G_i² / (N q_i)² ⪯
        1/N Σ [tr(G_i) / (N q_i)] G_i ⪯ max_i [tr(G_i) / (N q_i)] G, and the bracket is at most 1.01 tr(G). Where
        traces can only be estimated (parameters beyond linear and convolutional layers, sequences), q is mixed
        with a tenth of the uniform distribution, and C measured.

        "uniform": as the operator samples by itself. C is measured in some directions (`measure_recipe`), a
        lower bound, on fitted networks far above 2, the paper's. For operators without tr(G_i) it is the only way.

        Cost: products for λmax (20 at most), and (1 + C) / 5 for the traces of C outputs, or, where C is measured,
        ten products' worth of examples and eight products for tr.
        """
        generator = generator_for(operator, generator)
        recipe = measure_recipe(
            operator, damping, sampling=sampling, budget=_BUDGET, progress=progress, generator=generator
        )
        recipe = replace(recipe, problems=recipe.out_of_reach(error_rtol, operator.num_examples))
        for problem in recipe.problems:
            warnings.warn(f"LiSSA: {problem}", stacklevel=3)
        enough = recipe.steps_for(error_rtol)
        return replace(
            cls.from_recipe(recipe, error_rtol=error_rtol, max_steps=enough), callback=callback, progress=progress
        )

    @classmethod
    def from_recipe(cls, recipe: LissaRecipe, *, error_rtol: float = 0.2, max_steps: int | None = None) -> Lissa:
        """Return a solver with a recipe's settings, which averages the last third of the iterates."""
        settings = recipe.settings
        return cls(
            **asdict(settings),
            error_rtol=error_rtol,
            max_steps=None if max_steps is None else max(max_steps, settings.num_steps),
            average_last=max(1 if max_steps is None else 2, settings.num_steps // 3),
            recipe=recipe,
            probabilities=recipe.probabilities,
        )

    def stationary_error(
        self,
        operator: LinearOperator,
        x: Tensor,
        *,
        num_batches: int = 32,
        generator: Seed = None,
    ) -> Tensor:
        """Return the relative error that sampling noise leaves in the last iterate, () or (K,) for x as (P, K).

        sqrt(step_size Δ / (2 damping)) / ‖x‖, 0 for x = 0: Theorem 1's δ⁻¹ η² Δ, δ = 2ηλ, Δ = E‖(G_t - G) x‖²,
        measured on `num_batches` batches at the solution x. An upper bound, of the mean square; averaging stays
        below.
        """
        generator = generator_for(operator, generator)
        columns = check_right_hand_side(operator, x)
        if operator.damping <= 0:
            raise ValueError(
                f"the bound needs positive damping, got {operator.damping:g}: op + damping * identity"
            )
        sums, squares = torch.zeros_like(columns), operator.norm(columns) * 0
        for _ in range(num_batches):
            products = self.sample(operator, generator) @ columns - operator.damping * columns
            sums = sums + products
            squares = squares + operator.inner(products, products)
        variance = (squares - operator.inner(sums, sums) / num_batches) / (num_batches - 1)
        error = (self.step_size * variance.clamp(min=0) / (2 * operator.damping)).sqrt()
        norm = operator.norm(columns)
        return (error / torch.where(norm > 0, norm, torch.ones_like(norm))).reshape(x.shape[1:])


@dataclass(frozen=True)
class LissaState:
    """Where LiSSA stands.

    Attributes:
        x: u, (P, K), the last iterate.
        sums: of the iterates that are averaged, over the first half of them and over the second.
        generator: draws the batches.
        history: ‖b - A_t u‖ / ‖b‖ of all steps, on the CPU.
        num_steps: t.
        first: averaged are the iterates after this step.
        end: T, or what it has been raised to.
    """

    x: Tensor
    sums: list[Tensor]
    generator: torch.Generator | None
    first: int
    end: int
    history: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False

    @property
    def status(self) -> str:
        """The largest residual on the last batch."""
        return f"residual on a batch {float(self.history[-1].max()):.2g}"


class _Iteration:
    """The method, for `iterate`.

    Differs from Klochkov & Liu (2024), Eq. 6, in:
    1. it is their rescaled form, whose limit does not depend on the step size, and starts at 0;
    2. all right-hand sides share the batches;
    3. iterates longer than a convergent iteration can make them raise;
    4. the last iterates may be averaged, and tell an error.
    """

    def __init__(
        self, solver: Lissa, operator: LinearOperator, b: Tensor, generator: torch.Generator | None
    ) -> None:
        self.solver, self.operator, self.b, self.generator = solver, operator, b, generator
        self.columns = b[:, None] if b.ndim == 1 else b
        self.scale = operator.norm(self.columns)
        self.unit = torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b, generator=self.generator)

    def init(self) -> LissaState:
        u, solver = torch.zeros_like(self.columns), self.solver
        sums = self._sums() if solver.average_last else []
        return LissaState(u, sums, self.generator, solver.num_steps - solver.average_last, solver.num_steps)

    def _sums(self) -> list[Tensor]:
        return [torch.zeros_like(self.columns) for _ in range(2)]

    def step(self, state: LissaState) -> LissaState:
        solver, op, number = self.solver, self.operator, state.num_steps + 1
        products = solver.sample(op, state.generator) @ state.x
        residuals = products - self.columns
        u = state.x - solver.step_size * residuals
        state.history.append((op.norm(residuals) / self.unit).cpu())
        del residuals  # as large as u
        if solver.raise_on_divergence:
            self._check_growth(u, products, number)
        if state.sums and number > state.first:
            state.sums[number > _middle(state)] += u
        state = replace(state, x=u, num_steps=number)
        return self._ended(state) if number == state.end else state

    def _ended(self, state: LissaState) -> LissaState:
        """Return the state at the end of a stage: done, or with twice the steps before it."""
        solver, end = self.solver, state.end
        if solver.max_steps is None or solver.error_rtol is None or end >= solver.max_steps:
            return replace(state, done=True)
        if bool((self._error(state) <= solver.error_rtol).all()):
            return replace(state, done=True)
        longer = min(2 * end, solver.max_steps)
        averaged = min(longer - end, solver.average_last * longer // solver.num_steps)
        if averaged < 2:  # a step or two more: nothing to take an error from
            return replace(state, done=True)
        return replace(state, sums=self._sums(), first=longer - averaged, end=longer)

    def result(self, state: LissaState) -> Solution:
        solver, op, shape = self.solver, self.operator, self.b.shape
        u, error = state.x, None
        if solver.average_last:
            u = _mean(state)
        if solver.average_last >= 2:
            error = self._error(state).reshape(shape[1:])
        num_matvecs = state.num_steps * u.shape[1] + (solver.recipe.num_matvecs if solver.recipe else 0)
        residual, converged = torch.full_like(self.scale, math.nan), False
        if solver.check_residual:
            residual = relative_norm(op, self.columns - op @ u, self.columns)
            converged = bool((residual <= solver.rtol).all())
            if error is not None and solver.error_rtol is not None:
                converged = bool((error <= solver.error_rtol).all())
            num_matvecs += u.shape[1]
        history = torch.stack(state.history)
        return Solution(u.reshape(shape), residual.reshape(shape[1:]), converged, num_matvecs, error, history)

    def _error(self, state: LissaState) -> Tensor:
        """Return an estimate of the mean's relative error, (K,), from the distance between the halves.

        What remains of the start decays by at least q = exp(-rate · half) from one half to the next, so the mean
        is off by at most (1 + q) / (2 (1 - q)) of the distance; of noise by about half of it, itself a random
        number: three quarters at least are taken, times `SAFETY`.
        """
        op, solver, middle = self.operator, self.solver, _middle(state)
        counts = (middle - state.first, state.end - middle)
        decay = math.exp(-solver.step_size * op.damping * counts[1])
        factor = SAFETY * max(0.75, (1 + decay) / (2 * max(1 - decay, 1e-12)))
        distance = op.norm(state.sums[0] / counts[0] - state.sums[1] / counts[1])
        norm = op.norm(_mean(state))
        return torch.where(norm > 0, factor * distance / norm, torch.zeros_like(norm))

    def _check_growth(self, u: Tensor, products: Tensor, step: int) -> None:
        """Raise DivergenceError when an iterate is longer than a convergent iteration could make it.

        Contractions give ‖u_t‖ <= t step_size ‖b‖, and ‖u_t‖ <= ‖b‖ / damping where A - damping I is PSD.
        """
        operator, scale = self.operator, self.scale
        longest = step * self.solver.step_size
        if operator.is_psd and operator.damping > 0:
            longest = min(longest, 1 / operator.damping)
        norms = operator.norm(u)
        diverged = ~(norms <= _NORM_MARGIN * longest * scale)  # in this form NaN counts as diverged
        if not bool(diverged.any()):
            return
        # The iterate before was of bounded size: a product that is not finite is the model's doing.
        check_finite(products, f"the product with a batch of {describe(operator)}")
        relative = norms / scale
        columns = diverged.nonzero()[:, 0].tolist()
        worst = max(columns, key=lambda k: float(relative[k]))
        raise DivergenceError(
            step=step,
            norm=float(relative[worst]),
            columns=columns,
            num_columns=len(scale),
            advice=self._advice(u[:, worst]),
        )

    def _advice(self, direction: Tensor) -> str:
        """Say which setting is at fault, from the curvature along the direction that grows (one product)."""
        op, step_size, batch_size = self.operator, self.solver.step_size, self.solver.batch_size
        quotient = float(op.inner(direction, op @ direction) / op.inner(direction, direction))
        if not step_size * quotient < 1.5:
            return (
                f"The operator has an eigenvalue (damping included) of at least {quotient:.3g}, and step_size = "
                f"{step_size:.3g} exceeds what it allows: use step_size = {1 / quotient:.2g} or less, "
                "1 / (lambda_max + damping)."
            )
        return (
            f"step_size = {step_size:.3g} suits the full operator along the growing direction (curvature "
            f"{quotient:.3g}), so batch_size = {batch_size} is too small: |B| >= C trace / lambda_max, and "
            f"C may be 7 or more. Try batch_size = {4 * batch_size}, or lissa_hyperparameters(constant=14)."
        )


def _middle(state: LissaState) -> int:
    """Return the last step of the first half of the iterates that are averaged."""
    return state.first + (state.end - state.first) // 2


def _mean(state: LissaState) -> Tensor:
    return (state.sums[0] + state.sums[1]) / (state.end - state.first)


def _listed(columns: list[int]) -> str:
    shown = ", ".join(map(str, columns[:5]))
    return shown + (", ..." if len(columns) > 5 else "")
