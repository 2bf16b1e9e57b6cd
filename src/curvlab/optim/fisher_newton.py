"""Newton steps with a regularised matrix: the Fisher matrix in place of the Hessian, or a dense cubic model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import not_negative, positive, whole
from curvlab.curvature import FisherOperator
from curvlab.linalg import LinearOperator, identity
from curvlab.optim.flat import Closure, VectorOptimizer, evaluate
from curvlab.problem.closed_forms import BinaryCrossEntropy, CrossEntropy, SquaredError
from curvlab.problem.losses import OutputLoss
from curvlab.solvers import ConjugateGradient, Direct
from curvlab.solvers.solver import Solver

_DIRECT_SIZE = 500  # up to here a dense factorisation is cheaper than conjugate gradients


@dataclass(frozen=True)
class FisherNewtonInfo:
    """What one step did.

    Attributes:
        gradient_norm: ‖∇f‖ before the step.
        alpha: α_k = sqrt(M ‖∇f‖ / 2) + σ(x_k).
        sigma: σ(x_k).
        step_norm: ‖step‖, before lr.
        residual: relative residual of the linear solve.
        converged: whether the solver met its tolerance.
        num_matvecs: Fisher products of all steps so far.
    """

    gradient_norm: float
    alpha: float
    sigma: float
    step_norm: float
    residual: float
    converged: bool
    num_matvecs: int


class FisherNewton(VectorOptimizer):
    """x <- x - lr (F + α_k I)⁻¹ ∇f(x), α_k = sqrt(M ‖∇f‖ / 2) + σ(x_k) (Semenov 2025, Eq. 4).

    F is the Fisher matrix of the model's own labels, σ(x) a bound on ‖∇²f - F‖: L times the sum of the 1-norms of
    the loss's gradients by the outputs. From the loss value alone that is at most L sqrt(2S f) for f = ½ Σ r²
    (slides), 2 L f for softmax cross-entropy (the slides lose the L), L f for one logit; see
    `output_gradient_bound` for other scalings. For outputs linear in the parameters L = 0 and F is the Hessian.

    Args:
        params: all parameters that require gradients, in the order of `fisher`; one group.
        fisher: F at the parameters' current values, FisherOperator(model, loss, data).
        lr: factor of the step; 1 in the slides.
        smoothness: L, largest spectral norm of the Hessian of any output of any example by the parameters.
        hessian_lipschitz: M, of f's Hessian.
        sigma: constant σ; None: from the loss by the rule above, which needs a closure.
        num_predictions: single outputs in the data, examples times outputs; asked for by the rule for
            nn.MSELoss(reduction="sum") only.
        solver: of (F + α I) x = b; None: Direct up to 500 parameters, above ConjugateGradient(rtol=1e-6).

    Example:
        >>> from curvlab.curvature import FisherOperator
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> inputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
        >>> fisher = FisherOperator(model, loss, (inputs, targets))
        >>> optimizer = FisherNewton(model.parameters(), fisher, hessian_lipschitz=1.0)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     value = loss(model(inputs), targets)
        ...     value.backward()
        ...     return value
        >>> values = [float(optimizer.step(closure)) for _ in range(5)]
        >>> values[-1] < values[0], optimizer.last_step.converged
        (True, True)

    Cost of a step: that of the solver. A solve that has not converged is used (it still goes downhill) and
    reported in `last_step`.
    """

    attributes = ("fisher", "num_predictions", "solver", "last_step", "_num_matvecs")

    def __init__(
        self,
        params: ParamsT,
        fisher: FisherOperator,
        *,
        lr: float = 1.0,
        smoothness: float = 0.0,
        hessian_lipschitz: float = 0.0,
        sigma: float | None = None,
        num_predictions: int | None = None,
        solver: Solver | None = None,
    ) -> None:
        for name, value in {
            "smoothness": smoothness,
            "hessian_lipschitz": hessian_lipschitz,
            "sigma": sigma,
        }.items():
            if value is not None:
                not_negative(name, value)
        positive("lr", lr, "1 is the method of the slides")
        if not isinstance(fisher, FisherOperator) or fisher.kind == "empirical":
            raise ValueError(
                "FisherNewton needs a FisherOperator of kind 'exact' or 'monte_carlo': the bounds behind α_k are "
                "on its distance from the Hessian, and hold for no other matrix, the empirical Fisher included."
            )
        settings = {"lr": lr, "smoothness": smoothness, "hessian_lipschitz": hessian_lipschitz, "sigma": sigma}
        super().__init__(params, settings)
        self._check_size(fisher)
        if sigma is None and smoothness > 0:
            output_gradient_bound(fisher.loss, 0.0, num_predictions=num_predictions)  # refuse now, not in step
        self.fisher = fisher
        self.num_predictions = None if num_predictions is None else whole("num_predictions", num_predictions)
        size = fisher.shape[0]
        self.solver = solver or (Direct() if size <= _DIRECT_SIZE else ConjugateGradient(rtol=1e-6))
        self.last_step: FisherNewtonInfo | None = None
        self._num_matvecs = 0

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss.

        Args:
            closure: zeroes gradients, computes the loss as `fisher` scales it, calls backward(), returns the loss.

        Raises:
            ValueError: for a gradient that is not finite, or when the rule for σ lacks the loss.
        """
        loss = evaluate(closure)
        group = self._group()
        gradient = self._gradient()
        sigma = self._sigma(loss)
        gradient_norm = float(self.fisher.norm(gradient))
        alpha = math.sqrt(group["hessian_lipschitz"] * gradient_norm / 2) + sigma
        matrix: LinearOperator = self.fisher if alpha == 0 else self.fisher + alpha * identity
        solution = self.solver.solve(matrix, gradient)
        self._num_matvecs += solution.num_matvecs
        self._move(-group["lr"] * solution.x)
        self.last_step = FisherNewtonInfo(
            gradient_norm=gradient_norm,
            alpha=alpha,
            sigma=sigma,
            step_norm=float(self.fisher.norm(solution.x)),
            residual=float(solution.residual),
            converged=solution.converged,
            num_matvecs=self._num_matvecs,
        )
        return loss

    def _sigma(self, loss: Tensor | float | None) -> float:
        group = self.param_groups[0]
        if group["sigma"] is not None:
            return float(group["sigma"])
        if group["smoothness"] == 0:
            return 0.0
        if loss is None:
            raise ValueError(
                "FisherNewton's rule for σ needs the loss: pass step(closure) with a closure that returns it, or "
                "set sigma=."
            )
        bound = output_gradient_bound(self.fisher.loss, float(loss), num_predictions=self.num_predictions)
        return group["smoothness"] * bound


def output_gradient_bound(loss: OutputLoss, value: float, *, num_predictions: int | None = None) -> float:
    """Return a bound on the summed 1-norms of the loss's gradients by the outputs, from the loss value alone.

    Times L it bounds ‖∇²f - F‖ (Semenov 2025; there the norm on the left is squared, which cannot hold: under
    f -> c f the left side would grow as c², the right side as c).

    - softmax cross-entropy: the 1-norm is 2 (1 - p_y) <= -2 log p_y, in total 2 f;
    - one logit: 1 - p_y <= -log p_y, in total f;
    - squared error f = Σ r²: Σ |2 r| <= 2 sqrt(N f) by Cauchy-Schwarz; after a mean over N, 2 sqrt(f). For the
      slides' f = ½ Σ r² it reads sqrt(2 N f).

    Args:
        loss: as `operator.loss` has it: kind and reduction.
        value: f, scaled by that reduction.
        num_predictions: N, single outputs; for squared errors with reduction="sum" only.
    """
    if isinstance(loss, CrossEntropy):
        return 2 * value
    if isinstance(loss, BinaryCrossEntropy):
        return value
    if isinstance(loss, SquaredError):
        if loss.reduction == "mean":
            return 2 * math.sqrt(value)
        if num_predictions is None:
            raise ValueError(
                "the bound for nn.MSELoss(reduction='sum') grows with the number of outputs: pass "
                "num_predictions= (examples times outputs), or use reduction='mean'"
            )
        return 2 * math.sqrt(value * num_predictions)
    raise TypeError(f"no bound is known for {type(loss).__name__}: pass sigma= to FisherNewton")


class CubicNewton(VectorOptimizer):
    """x <- x + lr argmin_h ∇fᵀh + ½ hᵀHh + M/6 ‖h‖³ (Nesterov & Polyak 2006); M = 0 is Newton's method.

    The minimiser is h = -(H + M r/2 I)⁻¹ ∇f with r = ‖h‖; r is found by bisection on the eigenvalues of H. The
    hard case, a gradient without any part along the most negative curvature, is not treated: the step is then
    the limit without that part.

    Args:
        params: all parameters that require gradients, in the order of `hessian`; one group.
        hessian: H at the parameters' current values.
        lr: factor of the step; 1 is the method.
        hessian_lipschitz: M.
        max_size: refuse more parameters than this: H is formed, (n, n).

    Example:
        >>> from curvlab.linalg import DenseOperator
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> optimizer = CubicNewton([x], DenseOperator(torch.diag(torch.tensor([1.0, 4.0]))))
        >>> (x[0] ** 2 / 2 + 2 * x[1] ** 2).backward()
        >>> optimizer.step()
        >>> x.detach()
        tensor([0., 0.])

    Cost of a step: n products and an eigendecomposition, O(n³).
    """

    attributes = ("hessian", "num_matvecs")

    def __init__(
        self,
        params: ParamsT,
        hessian: LinearOperator,
        *,
        lr: float = 1.0,
        hessian_lipschitz: float = 0.0,
        max_size: int = 2000,
    ) -> None:
        positive("lr", lr, "1 is the method")
        not_negative("hessian_lipschitz", hessian_lipschitz)
        if hessian.shape[0] > whole("max_size", max_size):
            raise ValueError(
                f"CubicNewton forms the ({hessian.shape[0]}, {hessian.shape[0]}) Hessian, more than max_size = "
                f"{max_size}: use UniformDirection or FisherNewton, or raise max_size if the memory is there."
            )
        super().__init__(params, {"lr": lr, "hessian_lipschitz": hessian_lipschitz})
        self._check_size(hessian)
        self.hessian = hessian
        self.num_matvecs = 0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | float | None:  # type: ignore[override]
        """Take one step; return the closure's loss. The closure is as for UniformDirection."""
        loss = evaluate(closure)
        group = self._group()
        gradient = self._gradient()
        dense = self.hessian.to_dense()
        self.num_matvecs += len(dense)
        eigenvalues, vectors = torch.linalg.eigh((dense + dense.T) / 2)
        step = _regularised(eigenvalues, vectors.T @ gradient, group["hessian_lipschitz"])
        self._move(-group["lr"] * (vectors @ step))
        return loss


def _regularised(eigenvalues: Tensor, gradient: Tensor, lipschitz: float) -> Tensor:
    """Return (Λ + M r/2)⁻¹ g with r its own norm, in eigencoordinates."""
    if lipschitz == 0:
        return gradient / eigenvalues

    def step(radius: float) -> Tensor:
        return gradient / (eigenvalues + lipschitz * radius / 2)

    # ‖step(r)‖ - r falls in r where all denominators are positive; at `high` it is negative.
    low = max(0.0, -2 * float(eigenvalues[0]) / lipschitz)
    high = low + math.sqrt(2 * float(gradient.norm()) / lipschitz) + 1e-300
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float(step(middle).norm()) > middle else (low, middle)
    return step(high)
