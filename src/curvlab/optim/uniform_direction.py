"""Steps preconditioned by a rank-one estimate of the Hessian from a random direction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.linalg import LinearOperator
from curvlab.optim.flat import (
    Closure,
    VectorOptimizer,
    check_size,
    evaluate,
    gradient_vector,
    move,
    single_group,
)
from curvlab.optim.random_direction import direction_estimate, stated_sigma, unit_directions
from curvlab.spectrum import top_eigenvalues


@dataclass(frozen=True)
class UniformDirectionInfo:
    """What one step did.

    Attributes:
        gradient_norm: ‖∇f‖ before the step.
        alpha: α_k of the rule, before the safeguard.
        shift: multiple of the identity that was added to the estimate: δ + α_k, more where the safeguard acted.
        sigma: σ in the rule; nan when `alpha` was given.
        spectral_norm: largest |eigenvalue| of the Hessian measured so far; nan when it was not needed.
        hessian_lipschitz: M in the rule, given or the largest estimate so far; nan when `alpha` was given.
        smallest_eigenvalue: of the symmetric part of the estimate, without shift: negative, D is not PSD.
        safeguarded: whether the shift was raised.
        slope: ∇fᵀ(step), before lr; positive: the step goes uphill.
        step_norm: ‖step‖, before lr.
        num_matvecs: Hessian products of all steps so far.
    """

    gradient_norm: float
    alpha: float
    shift: float
    sigma: float
    spectral_norm: float
    hessian_lipschitz: float
    smallest_eigenvalue: float
    safeguarded: bool
    slope: float
    step_norm: float
    num_matvecs: int


class UniformDirection(VectorOptimizer):
    """x <- x - lr (D + (δ + α_k) I)⁻¹ ∇f(x), D = n/2 (H u uᵀ + u uᵀ H) (Semenov 2025, Eq. 2).

    u is uniform on the unit sphere, drawn anew in each step; D may be the mean over several directions, or not
    symmetrised. α_k = sqrt(M ‖∇f‖ / 2) + σ with σ² = λ² n(n-1)/m + nδ² (the Proposition: λ spectral norm of H, m
    directions), as in the lemma. What is not given is measured, and reported in `last_step`: λ by Lanczos on H
    and -H every `refresh_period` steps, M as 2 ‖∇f(x+h) - ∇f(x) - H(x) h‖ / ‖h‖² along the path (0 before the
    first step); both are running maxima, M from below.

    The lemma needs more than it says: its proof asks for D >= 0, but D has a negative eigenvalue for every u that
    is no eigenvector of H. For PSD H it is at least -λn/8, which σ outweighs (`steps_bound`); with a smaller σ, an
    indefinite H or without symmetrisation, steps may go uphill or be arbitrarily long. `safeguard` raises the
    shift, where needed, until the symmetric part of D + shift I is at least half the intended shift: then steps
    go downhill and are at most 2 ‖∇f‖ / shift long. It never acts where the lemma applies.

    Usage: a closure that zeroes gradients, computes the loss and calls backward(), as for torch.optim.LBFGS; or
    loss.backward() and step(). Pass step(hessian=...) for a product of the current batch.

    Args:
        params: all parameters that require gradients, in the order of `hessian`; one group.
        hessian: H at the parameters' current values, e.g. HessianOperator(model, loss, data).
        lr: factor of the step; 1 in the slides.
        delta: δ, added to the estimate.
        num_directions: m, directions a step.
        symmetrize: S, or else D = n H u uᵀ.
        alpha: α_k, constant; None: the rule above.
        sigma: σ; None: as above.
        hessian_lipschitz: M; None: estimated.
        safeguard: see above.
        refresh_period: steps between measurements of λ.
        generator: draws u and the start of Lanczos.

    Cost of a step: m products and O(n m²); one product more while M is estimated; λ about 10 to 50 at each
    refresh. Memory: 4 m vectors, 4 more while M is estimated; no matrix.
    """

    attributes = ("hessian", "generator", "last_step")

    def __init__(
        self,
        params: ParamsT,
        hessian: LinearOperator,
        *,
        lr: float = 1.0,
        delta: float = 0.0,
        num_directions: int = 1,
        symmetrize: bool = True,
        alpha: float | None = None,
        sigma: float | None = None,
        hessian_lipschitz: float | None = None,
        safeguard: bool = True,
        refresh_period: int = 20,
        generator: torch.Generator | None = None,
    ) -> None:
        nonnegative = {"delta": delta, "alpha": alpha, "sigma": sigma, "hessian_lipschitz": hessian_lipschitz}
        for name, value in nonnegative.items():
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if num_directions < 1 or refresh_period < 1:
            raise ValueError(
                f"num_directions and refresh_period must be at least 1, got {num_directions} and {refresh_period}"
            )
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}; 1 is the method of the slides")
        settings = {
            "lr": lr,
            "delta": delta,
            "num_directions": num_directions,
            "symmetrize": symmetrize,
            "alpha": alpha,
            "sigma": sigma,
            "hessian_lipschitz": hessian_lipschitz,
            "safeguard": safeguard,
            "refresh_period": refresh_period,
        }
        super().__init__(params, settings)
        check_size(single_group(self.param_groups, name="UniformDirection"), hessian, name="UniformDirection")
        self.hessian = hessian
        self.generator = generator
        self.last_step: UniformDirectionInfo | None = None

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None, *, hessian: LinearOperator | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss.

        Args:
            closure: zeroes gradients, computes the loss, calls backward(), returns the loss.
            hessian: of the batch that the gradient is of; by default that of the whole objective.

        Raises:
            ValueError: for a gradient that is not finite.
        """
        loss = evaluate(closure)
        group = single_group(self.param_groups, name="UniformDirection")
        gradient = gradient_vector(group, name="UniformDirection")
        operator = self.hessian if hessian is None else hessian
        state = self._initialised_state(group)
        alpha, sigma = self._alpha(group, state, operator, gradient)

        directions = unit_directions(operator, group["num_directions"], generator=self.generator)
        estimate = direction_estimate(operator, directions, symmetrize=group["symmetrize"])
        state["num_matvecs"] += group["num_directions"]
        smallest = estimate.smallest_eigenvalue()
        intended = group["delta"] + alpha
        shift = max(intended, intended / 2 - smallest) if group["safeguard"] else intended
        step = -estimate.solve_shifted(gradient, shift=shift)
        if _estimates_lipschitz(group):
            self._remember(state, operator, gradient, group["lr"] * step)
        move(group, group["lr"] * step)
        state["step"] += 1
        self.last_step = UniformDirectionInfo(
            gradient_norm=float(operator.norm(gradient)),
            alpha=alpha,
            shift=shift,
            sigma=sigma,
            spectral_norm=state["spectral_norm"],
            hessian_lipschitz=math.nan if group["alpha"] is not None else _lipschitz(group, state),
            smallest_eigenvalue=smallest,
            safeguarded=shift > intended,
            slope=float(operator.inner(gradient, step)),
            step_norm=float(operator.norm(step)),
            num_matvecs=state["num_matvecs"],
        )
        return loss

    def _initialised_state(self, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[group["params"][0]]
        if not state:
            state.update(step=0, num_matvecs=0, spectral_norm=math.nan, hessian_lipschitz=0.0)
        return state

    def _alpha(
        self, group: dict[str, Any], state: dict[str, Any], operator: LinearOperator, gradient: Tensor
    ) -> tuple[float, float]:
        """Return α_k and σ."""
        if group["alpha"] is not None:
            return float(group["alpha"]), math.nan
        if group["hessian_lipschitz"] is None:
            self._update_lipschitz(state, operator, gradient)
        sigma = group["sigma"]
        if sigma is None:
            if state["step"] % group["refresh_period"] == 0:
                self._update_spectral_norm(state, operator)
            sigma = stated_sigma(
                operator.shape[0],
                spectral_norm=state["spectral_norm"],
                delta=group["delta"],
                num_directions=group["num_directions"],
            )
        return math.sqrt(_lipschitz(group, state) * float(operator.norm(gradient)) / 2) + sigma, float(sigma)

    def _update_spectral_norm(self, state: dict[str, Any], operator: LinearOperator) -> None:
        for signed in (operator, -operator):
            found = top_eigenvalues(signed, 1, rtol=1e-2, generator=self.generator)
            state["num_matvecs"] += found.num_matvecs
            upper = float(found.values[0] + found.error_bounds[0])
            state["spectral_norm"] = (
                upper if math.isnan(state["spectral_norm"]) else max(state["spectral_norm"], upper)
            )

    def _remember(self, state: dict[str, Any], operator: LinearOperator, gradient: Tensor, step: Tensor) -> None:
        """Keep the gradient that a constant Hessian would give at the next point."""
        state["predicted_gradient"] = gradient + operator @ step
        state["scale"] = float(operator.norm(gradient))
        state["displacement_norm"] = float(operator.norm(step))
        state["num_matvecs"] += 1

    def _update_lipschitz(self, state: dict[str, Any], operator: LinearOperator, gradient: Tensor) -> None:
        if "predicted_gradient" not in state:
            return
        error = float(operator.norm(gradient - state["predicted_gradient"]))
        rounding = 100 * torch.finfo(gradient.dtype).eps * (state["scale"] + float(operator.norm(gradient)))
        if error > rounding:  # otherwise the step was too short to tell
            estimate = 2 * error / state["displacement_norm"] ** 2
            state["hessian_lipschitz"] = max(state["hessian_lipschitz"], estimate)


def _estimates_lipschitz(group: dict[str, Any]) -> bool:
    return group["alpha"] is None and group["hessian_lipschitz"] is None


def _lipschitz(group: dict[str, Any], state: dict[str, Any]) -> float:
    given = group["hessian_lipschitz"]
    return float(state["hessian_lipschitz"] if given is None else given)
