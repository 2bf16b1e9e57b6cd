"""LiSSA: stochastic fixed-point iteration for inverse products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint
from curvlab.linalg import LinearOperator
from curvlab.solvers.halves import Halves
from curvlab.solvers.importance_recipe import measure_importance_recipe
from curvlab.solvers.recipe import LissaRecipe, measure_recipe
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import check_definite, check_finite, check_right_hand_side, open_checkpoint
from curvlab.spectrum.probes import describe

Callback = Callable[[int, Tensor], None]

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
class Lissa:
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
        check_residual: False skips the final product with the full operator: residual is then nan, and
            converged False because nothing is known.
        callback: called as callback(step, u) after each step, u (P, K) not to be modified.
        recipe: what the settings were computed from, if they were (`Lissa.auto`); its cost is counted.
        checkpoint: file in which the iterate and the generator's state are kept, saved every minute: after a kill
            the same call goes on there and ends at the same numbers.
        checkpoint_every: save after so many steps, too.
        weights: probabilities by which a batch's examples are drawn, (N,), each then weighted to keep the mean
            (`op.sample(batch_size, generator, weights)`); None: uniformly. Where they follow tr(G_i), C is 1.
        raise_on_divergence: False returns what the iteration gives, as the authors' code does: only to show
            what that is. ‖x‖ > ‖b‖ / damping then tells that a column is no solution.

    Cost: num_steps sampled products a column, which are counted in `num_matvecs` as they are, though each
    touches batch_size examples only; plus one full product a column for the residual.
    """

    step_size: float
    batch_size: int
    num_steps: int
    rtol: float = 0.1
    average_last: int = 0
    error_rtol: float | None = None
    check_residual: bool = True
    callback: Callback | None = None
    recipe: LissaRecipe | None = None
    raise_on_divergence: bool = True
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None
    weights: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.step_size > 0 and math.isfinite(self.step_size)):
            raise ValueError(f"step_size must be positive, got {self.step_size}: 1 / (lambda_max + damping)")
        if self.batch_size < 1 or self.num_steps < 1:
            raise ValueError(
                f"batch_size and num_steps must be at least 1, got {self.batch_size} and {self.num_steps}"
            )
        if not 0 <= self.average_last <= self.num_steps:
            raise ValueError(
                f"average_last must be between 0 and num_steps = {self.num_steps}, got {self.average_last}"
            )

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return x ≈ A⁻¹ b for b (P,) or (P, K); raises DivergenceError rather than return garbage."""
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        scale = operator.norm(columns)
        u = torch.zeros_like(columns)
        history: list[Tensor] = []
        unit = torch.where(scale > 0, scale, torch.ones_like(scale))
        halves = Halves(columns, self.num_steps, self.average_last)
        checkpoint, done = self._open_checkpoint(operator, columns, generator), 0
        if checkpoint is not None and generator is not None and (kept := checkpoint.load()) is not None:
            u, done = kept["u"].to(u), kept["num_steps"]
            halves.sums = [part.to(u) for part in kept["sums"]]
            history = list(kept["history"])
            generator.set_state(kept["generator"])
        for step in range(done + 1, self.num_steps + 1):
            products = self._batch(operator, generator) @ u
            residuals = products - columns
            new = u - self.step_size * residuals
            history.append((operator.norm(residuals) / unit).cpu())
            del residuals  # as large as u
            if self.raise_on_divergence:
                self._check_growth(operator, new, products, scale, step)
            u = new
            halves.add(u, step)
            if self.callback is not None:
                self.callback(step, u)
            if checkpoint is not None and generator is not None and checkpoint.due(step):
                state = {"u": u, "num_steps": step, "sums": halves.sums, "generator": generator.get_state()}
                checkpoint.save(state | {"history": history})
        seen = torch.stack(history) if history else None
        error = None
        if self.average_last:
            u = halves.mean()
        if self.average_last >= 2:
            error = halves.error(operator, self.step_size * operator.damping).reshape(b.shape[1:])
        num_matvecs = self.num_steps * columns.shape[1] + (self.recipe.num_matvecs if self.recipe else 0)
        if not self.check_residual:
            unknown = torch.full_like(scale, math.nan)
            return Solution(u.reshape(b.shape), unknown.reshape(b.shape[1:]), False, num_matvecs, error, seen)
        residual = relative_norm(operator, columns - operator @ u, columns)
        converged = bool((residual <= self.rtol).all())
        if error is not None and self.error_rtol is not None:
            converged = bool((error <= self.error_rtol).all())
        num_matvecs += columns.shape[1]
        return Solution(u.reshape(b.shape), residual.reshape(b.shape[1:]), converged, num_matvecs, error, seen)

    def _open_checkpoint(
        self, operator: LinearOperator, columns: Tensor, generator: torch.Generator | None
    ) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        if generator is None:
            raise ValueError("a checkpoint keeps the state of the batches' generator: pass generator=...")
        numbers = (self.step_size, self.batch_size, self.num_steps, self.average_last, generator.initial_seed())
        name = f"Lissa {numbers}"
        if self.weights is not None:
            places = torch.arange(len(self.weights)).to(self.weights)
            name += f" by {float((self.weights * places).sum())!r}"
        return open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)

    @classmethod
    def auto(
        cls,
        operator: LinearOperator,
        damping: float,
        *,
        sampling: Literal["importance", "uniform"] = "importance",
        error_rtol: float = 0.2,
        callback: Callback | None = None,
        generator: torch.Generator | None = None,
    ) -> Lissa:
        """Return a solver for `operator + damping * identity` with settings measured on `operator`.

        λmax and tr are measured, |B| = 2 C tr / λmax, four time constants are run, and the last third of the
        iterates is averaged. `recipe` on the result says what was measured; its products are counted in each
        solution. For the error to expect, see `stationary_error`; each solution carries its own estimate, and
        `converged` if that is at most `error_rtol`.

        Convergence of the second moment takes |B| >= C tr / λmax, where E H̃² - G² ⪯ C tr(G) G for the matrix H̃
        of one drawn example (Klochkov & Liu 2024, condition C.1, Corollary 1). Which C that is, is the sampling's:

        "importance": examples are drawn with q_i ∝ max(tr(G_i), 0.01 mean) and weighted by 1 / (N q_i). Then
        C <= 1.01 for any network, by proof: G_i² ⪯ tr(G_i) G_i, so E H̃² = Σ q_i G_i² / (N q_i)² ⪯
        1/N Σ [tr(G_i) / (N q_i)] G_i ⪯ max_i [tr(G_i) / (N q_i)] G, and the bracket is at most 1.01 tr(G). Where
        traces can only be estimated (parameters beyond linear and convolutional layers, sequences), q is mixed
        with a tenth of the uniform distribution, and C measured.

        "uniform": as the operator samples by itself. C is measured in some directions (`measure_recipe`): 7 to 36
        on fitted networks, a lower bound. For operators that know no tr(G_i) it is the only way.
        """
        if sampling not in ("importance", "uniform"):
            raise ValueError(f"sampling must be 'importance' or 'uniform', got {sampling!r}")
        measure = measure_importance_recipe if sampling == "importance" else measure_recipe
        recipe = measure(operator, damping, generator=generator)
        settings = recipe.settings
        return cls(
            settings.step_size,
            settings.batch_size,
            settings.num_steps,
            error_rtol=error_rtol,
            average_last=max(1, settings.num_steps // 3),
            callback=callback,
            recipe=recipe,
            weights=recipe.weights,
        )

    def stationary_error(
        self,
        operator: LinearOperator,
        x: Tensor,
        *,
        num_batches: int = 32,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the relative error that sampling noise leaves in the last iterate, () or (K,) for x as (P, K).

        sqrt(step_size Δ / (2 damping)) / ‖x‖, 0 for x = 0: Theorem 1's δ⁻¹ η² Δ, δ = 2ηλ, Δ = E‖(G_t - G) x‖²,
        measured on `num_batches` batches at the solution x. An upper bound, of the mean square; averaging stays
        below.
        """
        columns = check_right_hand_side(operator, x)
        if operator.damping <= 0:
            raise ValueError(
                f"the bound needs positive damping, got {operator.damping:g}: op + damping * identity"
            )
        sums, squares = torch.zeros_like(columns), operator.norm(columns) * 0
        for _ in range(num_batches):
            products = self._batch(operator, generator) @ columns - operator.damping * columns
            sums = sums + products
            squares = squares + operator.inner(products, products)
        variance = (squares - operator.inner(sums, sums) / num_batches) / (num_batches - 1)
        error = (self.step_size * variance.clamp(min=0) / (2 * operator.damping)).sqrt()
        norm = operator.norm(columns)
        return (error / torch.where(norm > 0, norm, torch.ones_like(norm))).reshape(x.shape[1:])

    def _batch(self, operator: LinearOperator, generator: torch.Generator | None) -> LinearOperator:
        if self.weights is None:  # operators of users may know uniform batches alone
            return operator.sample(self.batch_size, generator)
        return operator.sample(self.batch_size, generator, self.weights)

    def _check_growth(
        self, operator: LinearOperator, u: Tensor, products: Tensor, scale: Tensor, step: int
    ) -> None:
        """Raise DivergenceError when an iterate is longer than a convergent iteration could make it.

        Contractions give ‖u_t‖ <= t step_size ‖b‖, and ‖u_t‖ <= ‖b‖ / damping where A - damping I is PSD.
        """
        longest = step * self.step_size
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
            advice=self._advice(operator, u[:, worst]),
        )

    def _advice(self, operator: LinearOperator, direction: Tensor) -> str:
        """Say which setting is at fault, from the curvature along the direction that grows (one product)."""
        quotient = float(operator.inner(direction, operator @ direction) / operator.inner(direction, direction))
        if not self.step_size * quotient < 1.5:
            return (
                f"The operator has an eigenvalue (damping included) of at least {quotient:.3g}, and step_size = "
                f"{self.step_size:.3g} exceeds what it allows: use step_size = {1 / quotient:.2g} or less, "
                "1 / (lambda_max + damping)."
            )
        return (
            f"step_size = {self.step_size:.3g} suits the full operator along the growing direction (curvature "
            f"{quotient:.3g}), so batch_size = {self.batch_size} is too small: |B| >= C trace / lambda_max, and "
            f"C may be 7 or more. Try batch_size = {4 * self.batch_size}, or lissa_hyperparameters(constant=14)."
        )


def _listed(columns: list[int]) -> str:
    shown = ", ".join(map(str, columns[:5]))
    return shown + (", ..." if len(columns) > 5 else "")
