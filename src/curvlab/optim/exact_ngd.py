"""Natural gradient descent with the full, smoothed Fisher matrix: for small models, and as a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import not_negative, positive, whole
from curvlab.curvature.rows import dense_matrix
from curvlab.linalg import LinearOperator
from curvlab.optim.flat import Closure, DivergedError, VectorOptimizer, evaluate


@dataclass(frozen=True)
class ExactNGDInfo:
    """What one step did.

    Attributes:
        gradient_norm: ‖∇L‖.
        trace: tr F, before smoothing.
        kappa: κ.
        step_norm: ‖(F + κI)⁻¹ ∇L‖, before lr; ‖∇L‖ with rescale=True.
        num_matvecs: columns of F that all steps so far have formed, a product's worth each unless rows give F.
    """

    gradient_norm: float
    trace: float
    kappa: float
    step_norm: float
    num_matvecs: int


class ExactNGD(VectorOptimizer):
    """w <- w - lr (F + κI)⁻¹ ∇L, κ = α/d · max(tr F, ε), d parameters (Saghir et al. 2024, Eqs. 5 to 7).

    Unlike `NGD` it forms F of all parameters together, keeps no average over steps, and does not multiply by κ:
    for α -> ∞ it is SGD at lr/κ, with rescale=True SGD at lr.

    Usage: loss.backward() and step(), or step(closure). Pass step(fisher=FisherOperator(model, loss, batch)) for
    the Fisher matrix of the current batch.

    Args:
        params: all parameters that require gradients, in the order of `fisher`; one group.
        fisher: F at the parameters' current values, FisherOperator(model, loss, data).
        lr: factor of the step.
        alpha: α, smoothing in units of the mean eigenvalue; 0 needs a regular F.
        epsilon: ε, floor of tr F in κ.
        rescale: rescale the step to the gradient's norm, as `NGD` does by default.
        max_size: refuse more parameters than this: F is formed, (d, d).

    Cost of a step: d products with F, or one product of its examples' rows where all parameters are in linear and
    convolutional layers (`dense_matrix`); d² memory and O(d³) for the factorisation.

    Example:
        >>> from curvlab.curvature import FisherOperator
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> inputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
        >>> fisher = FisherOperator(model, loss, (inputs, targets))
        >>> optimizer = ExactNGD(model.parameters(), fisher, lr=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     value = loss(model(inputs), targets)
        ...     value.backward()
        ...     return value
        >>> values = [float(optimizer.step(closure)) for _ in range(5)]
        >>> values[-1] < values[0], optimizer.last_step.num_matvecs
        (True, 40)

    Raises:
        ValueError: a setting out of range, too many parameters, gradients that are not finite, a singular F + κI.
    """

    attributes = ("fisher", "last_step", "_num_matvecs")

    def __init__(
        self,
        params: ParamsT,
        fisher: LinearOperator,
        lr: float,
        *,
        alpha: float = 0.1,
        epsilon: float = 1e-10,
        rescale: bool = False,
        max_size: int = 5000,
    ) -> None:
        positive("lr", lr)
        not_negative("alpha", alpha)
        positive("epsilon", epsilon)
        if fisher.shape[0] > whole("max_size", max_size):
            raise ValueError(
                f"ExactNGD forms the ({fisher.shape[0]}, {fisher.shape[0]}) Fisher matrix, more than max_size = "
                f"{max_size}: use NGD, or raise max_size if the memory is there."
            )
        super().__init__(params, {"lr": lr, "alpha": alpha, "epsilon": epsilon, "rescale": rescale})
        self._check_size(fisher)
        self.fisher = fisher
        self.last_step: ExactNGDInfo | None = None
        self._num_matvecs = 0

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None, *, fisher: LinearOperator | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss.

        Args:
            closure: zeroes gradients, computes the loss, calls backward(), returns the loss.
            fisher: of the batch that the gradient is of; by default that of the whole objective.
        """
        loss = evaluate(closure)
        group = self._group()
        gradient = self._gradient()
        operator = self.fisher if fisher is None else fisher
        self._check_size(operator)
        dense = dense_matrix(operator)
        if not bool(dense.isfinite().all()):
            raise DivergedError("the Fisher matrix holds NaN or infinity: the iteration has diverged. Lower lr.")
        self._num_matvecs += len(dense)
        trace = float(dense.trace())
        kappa = group["alpha"] / len(dense) * max(trace, group["epsilon"])
        step = _solve(dense, kappa, gradient)
        gradient_norm = float(gradient.norm())
        if group["rescale"] and gradient_norm > 0:
            step = step * (gradient_norm / step.norm())
        self._move(-group["lr"] * step)
        self.last_step = ExactNGDInfo(
            gradient_norm=gradient_norm,
            trace=trace,
            kappa=kappa,
            step_norm=float(step.norm()),
            num_matvecs=self._num_matvecs,
        )
        return loss


def _solve(fisher: Tensor, kappa: float, gradient: Tensor) -> Tensor:
    """Return (F + κI)⁻¹ g, factorised in double precision: in single, 2 % are lost at alpha = 1e-4."""
    wide = fisher.double()
    smoothed = (wide + wide.mT) / 2 + kappa * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    factor, failed = torch.linalg.cholesky_ex(smoothed)
    if failed:
        raise ValueError(
            f"F + κI with κ = {kappa:.3g} is not positive definite in double precision: a Fisher matrix has "
            "directions of no effect. Raise alpha, for example to 0.01."
        )
    return torch.cholesky_solve(gradient[:, None].double(), factor)[:, 0].to(gradient.dtype)
