"""A Hessian estimated from random directions, steps preconditioned by it, and their number (Semenov 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import not_negative, positive, whole
from curvlab.linalg import LinearOperator
from curvlab.optim.flat import Closure, VectorOptimizer, evaluate
from curvlab.seeding import Seed, as_generator
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

    Example:
        >>> from curvlab.linalg import DenseOperator
        >>> x, H = torch.nn.Parameter(torch.ones(3)), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> optimizer = UniformDirection([x], DenseOperator(H), generator=torch.Generator().manual_seed(0))
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     value = x @ H @ x / 2
        ...     value.backward()
        ...     return value
        >>> values = [float(optimizer.step(closure)) for _ in range(30)]
        >>> values[-1] < 0.1 * values[0], optimizer.last_step.slope < 0
        (True, True)

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

    Cost of a step: m products and O(n m²); one product more while M is estimated; a run of
    Lanczos for λ at each refresh. Memory: 4 m vectors, 4 more while M is estimated; no matrix.
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
        generator: Seed = None,
    ) -> None:
        nonnegative = {"delta": delta, "alpha": alpha, "sigma": sigma, "hessian_lipschitz": hessian_lipschitz}
        for name, value in nonnegative.items():
            if value is not None:
                not_negative(name, value)
        num_directions = whole("num_directions", num_directions)
        refresh_period = whole("refresh_period", refresh_period)
        positive("lr", lr, "1 is the method of the slides")
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
        self._check_size(hessian)
        self.hessian = hessian
        self.generator = as_generator(generator, hessian.device)
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
        group = self._group()
        gradient = self._gradient()
        operator = self.hessian if hessian is None else hessian
        state = self.state[group["params"][0]]
        if not state:
            state.update(step=0, num_matvecs=0, spectral_norm=math.nan, hessian_lipschitz=0.0)
        alpha, sigma = self._alpha(group, state, operator, gradient)

        # Differs from the slides' Eq. 2 in:
        # 1. D may be the mean over several directions, each with a product of its own.
        # 2. λ and M, which the slides take as known, are measured where they are not given.
        # 3. The safeguard, for indefinite H, where the lemma does not hold; it never acts where the lemma applies.
        directions = unit_directions(operator, group["num_directions"], generator=self.generator)
        estimate = direction_estimate(operator, directions, symmetrize=group["symmetrize"])
        state["num_matvecs"] += group["num_directions"]
        smallest = estimate.smallest_eigenvalue()
        intended = group["delta"] + alpha
        shift = max(intended, intended / 2 - smallest) if group["safeguard"] else intended
        step = -estimate.solve_shifted(gradient, shift=shift)
        moved = group["lr"] * step
        if group["alpha"] is None and group["hessian_lipschitz"] is None:
            state["predicted_gradient"] = gradient + operator @ moved  # at the next point, of a constant Hessian
            state["scale"] = float(operator.norm(gradient))
            state["displacement_norm"] = float(operator.norm(moved))
            state["num_matvecs"] += 1
        self._move(moved)
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

    def _update_lipschitz(self, state: dict[str, Any], operator: LinearOperator, gradient: Tensor) -> None:
        if "predicted_gradient" not in state:
            return
        error = float(operator.norm(gradient - state["predicted_gradient"]))
        rounding = 100 * torch.finfo(gradient.dtype).eps * (state["scale"] + float(operator.norm(gradient)))
        if error > rounding:  # otherwise the step was too short to tell
            estimate = 2 * error / state["displacement_norm"] ** 2
            state["hessian_lipschitz"] = max(state["hessian_lipschitz"], estimate)


def _lipschitz(group: dict[str, Any], state: dict[str, Any]) -> float:
    given = group["hessian_lipschitz"]
    return float(state["hessian_lipschitz"] if given is None else given)


@dataclass(frozen=True)
class LowRankMatrix:
    """Q C Qᵀ, (n, n), not symmetric in general, never formed.

    Attributes:
        basis: Q, (n, r), orthonormal columns.
        core: C, (r, r).
    """

    basis: Tensor
    core: Tensor

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, span: Tensor) -> LowRankMatrix:
        """Return A Bᵀ for A and B of shape (n, k), whose columns lie in the span of `span`, (n, r).

        Cost: a QR factorisation, O(n r²).
        """
        basis = torch.linalg.qr(span).Q
        return cls(basis, (basis.T @ left) @ (basis.T @ right).T)

    def solve_shifted(self, b: Tensor, *, shift: float) -> Tensor:
        """Return (Q C Qᵀ + shift I)⁻¹ b, (n,) -> (n,). Cost: O(n r) and one r x r solve.

        Woodbury's identity in an orthonormal basis: C + shift I inside the span, shift outside. The usual form,
        1/shift [I - A (shift I + BᵀA)⁻¹ Bᵀ], cancels where the shift is small.
        """
        inside = self.basis.T @ b
        identity = torch.eye(len(self.core), dtype=self.core.dtype, device=self.core.device)
        solution = self.basis @ torch.linalg.solve(self.core + shift * identity, inside)
        if self._spans_everything:
            return solution
        return solution + (b - self.basis @ inside) / shift

    def smallest_eigenvalue(self) -> float:
        """Return the smallest eigenvalue of the symmetric part, (M + Mᵀ)/2. Cost: O(r³)."""
        smallest = float(torch.linalg.eigvalsh((self.core + self.core.T) / 2)[0])
        return smallest if self._spans_everything else min(smallest, 0.0)

    def to_dense(self) -> Tensor:
        """Return the (n, n) matrix."""
        return self.basis @ self.core @ self.basis.T

    @property
    def _spans_everything(self) -> bool:
        return self.basis.shape[1] == self.basis.shape[0]


def unit_directions(operator: LinearOperator, count: int, *, generator: Seed = None) -> Tensor:
    """Return directions drawn uniformly from the unit sphere, (n, count)."""
    drawn = operator.randn(count, as_generator(generator, operator.device))
    return drawn / operator.norm(drawn)


def direction_estimate(hessian: LinearOperator, directions: Tensor, *, symmetrize: bool = True) -> LowRankMatrix:
    """Return the mean over directions u of S = n/2 (H u uᵀ + u uᵀ H), or of D = n H u uᵀ (Semenov 2025).

    E[D] = E[S] = H for u uniform on the unit sphere. D is not symmetric; neither is positive semi-definite, also
    where H is: the eigenvalues of S are n/2 (uᵀHu ± ‖Hu‖) and zeros.

    Args:
        hessian: H, (n, n), symmetric.
        directions: unit vectors, (n, m).
        symmetrize: S, or else D.

    Cost: m products, O(n m²).
    """
    products = hessian @ directions
    num_parameters, num_directions = directions.shape
    scale = num_parameters / num_directions
    span = torch.cat([directions, products], dim=1)
    if not symmetrize:
        return LowRankMatrix.from_factors(scale * products, directions, span)
    right = torch.cat([directions, products], dim=1)
    return LowRankMatrix.from_factors(scale / 2 * torch.cat([products, directions], dim=1), right, span)


def expected_squared_error(
    size: int,
    *,
    squared_norm: float,
    trace: float,
    delta: float = 0.0,
    symmetrize: bool = True,
    num_directions: int = 1,
) -> float:
    """Return E‖D + delta I - H‖²_F exactly.

    One direction, unsymmetrised: E‖D‖² = n² E[uᵀH²u], so (n - 1) ‖H‖². Symmetrised: n²/2 [‖H‖²/n +
    (2 ‖H‖² + tr(H)²) / (n (n + 2))] - ‖H‖², from E[(uᵀHu)²]. Averaging m directions divides by m; the shift adds
    n delta², because the rest has mean zero.

    Args:
        size: n.
        squared_norm: ‖H‖²_F.
        trace: tr(H).
        delta: multiple of the identity that is added (δ).
        symmetrize: S, or else D.
        num_directions: m.
    """
    if symmetrize:
        fourth = (2 * squared_norm + trace**2) / (size * (size + 2))
        one = size**2 / 2 * (squared_norm / size + fourth) - squared_norm
    else:
        one = (size - 1) * squared_norm
    return one / num_directions + size * delta**2


def stated_squared_error(size: int, *, spectral_norm: float, delta: float = 0.0, num_directions: int = 1) -> float:
    """Return λ² n (n - 1) / m + n δ², what the Proposition of Semenov (2025) states for m = 1.

    It is printed as an equality; it is an upper bound, attained by multiples of the identity (unsymmetrised, by
    all H with H² = λ² I). λ must be the spectral norm: the largest eigenvalue of an indefinite H is too small.
    """
    return spectral_norm**2 * size * (size - 1) / num_directions + size * delta**2


def stated_sigma(size: int, *, spectral_norm: float, delta: float = 0.0, num_directions: int = 1) -> float:
    """Return the σ of the α_k rule, the root of `stated_squared_error`."""
    return math.sqrt(
        stated_squared_error(size, spectral_norm=spectral_norm, delta=delta, num_directions=num_directions)
    )


def steps_bound(
    epsilon: float,
    *,
    gap: float,
    gradient_norm: float,
    hessian_lipschitz: float,
    sigma: float = 0.0,
    sigma_slope: float = 0.0,
    sigma_root: float = 0.0,
) -> float:
    """Return K(ε), steps enough for min ‖∇f(x_k)‖ <= ε, for α_k = sqrt(M ‖∇f‖ / 2) + σ(x_k).

    K = ⌈8 (f(x_0) - f*) (sqrt(M/2) ε^-3/2 + Σ terms of σ) + 2 log(‖∇f(x_0)‖ / ε)⌉, where a part of σ(x) that is

    - constant, at most `sigma`, adds sigma ε^-2 (the lemma on uniform directions, Eq. 3);
    - at most sigma_root ‖∇f(x)‖^½ adds sigma_root ε^-3/2 (least squares: L sqrt(2 S R), beside the constant
      L sqrt(2 S f*));
    - at most sigma_slope ‖∇f(x)‖ adds sigma_slope ε^-1 (softmax: 2 L R, beside the constant 2 L f*).

    R is a number with f - f* <= R ‖∇f‖, which the slides leave undefined. Eq. 3 as printed has log(‖∇f(x_0)‖ / 2):
    under f -> c f (M, σ, ε and gradients times c) the method takes the same steps, and only the form above keeps
    its value. The step that carries the proof: with D positive semi-definite and ‖D - H‖ <= σ, a step of norm r
    has ‖∇f(x_{k+1})‖ <= 2 α_k r and lowers f by at least α_k r²/2 >= ‖∇f(x_{k+1})‖² / (8 α_k).

    S is not positive semi-definite. For convex f the proof still goes through, for every draw and not only on
    average, with 8 / (1 - κ) in place of 8: ‖S - H‖ <= λ (n - 1) < σ, and the smallest eigenvalue of S is at least
    -λn/8 = -κσ with κ = n / (8 sqrt(n (n - 1))) <= 0.18. For f that is not convex the lemma is false: S + α_k I
    may be indefinite, and where it is definite a step may still be too long. Already for n = 1 (D = f'', σ = 0)
    the method can cycle for ever: experiments/rank1/objectives.py, `trapping_curve`.

    Args:
        epsilon: ε > 0.
        gap: f(x_0) - f*.
        gradient_norm: ‖∇f(x_0)‖.
        hessian_lipschitz: M.
        sigma: see above.
        sigma_slope: see above.
        sigma_root: see above.
    """
    positive("epsilon", epsilon)
    positive("gradient_norm", gradient_norm)
    given = {"gap": gap, "hessian_lipschitz": hessian_lipschitz}
    given |= {"sigma": sigma, "sigma_slope": sigma_slope, "sigma_root": sigma_root}
    for name, value in given.items():
        not_negative(name, value)
    terms = (math.sqrt(hessian_lipschitz / 2) + sigma_root) * epsilon**-1.5 + sigma * epsilon**-2
    terms += sigma_slope / epsilon
    return math.ceil(8 * gap * terms + 2 * math.log(gradient_norm / epsilon))


def printed_steps_bound(
    epsilon: float, *, gap: float, gradient_norm: float, hessian_lipschitz: float, sigma: float
) -> float:
    """Return K(ε) as Eq. 3 prints it, with log(‖∇f(x_0)‖ / 2)."""
    terms = math.sqrt(hessian_lipschitz / 2) * epsilon**-1.5 + sigma * epsilon**-2
    return math.ceil(8 * gap * terms + 2 * math.log(gradient_norm / 2))
