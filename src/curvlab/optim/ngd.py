"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.ngd_axis import Smoothing
from curvlab.optim.ngd_bucket import initial_state
from curvlab.optim.ngd_cohort import Cohort, cohorts
from curvlab.optim.parameter_vector import Closure, DivergedError, evaluate


class NGD(torch.optim.Optimizer):
    """w <- w - lr · (F + κI)⁻¹ ∇L, F estimated per axis of each parameter tensor (Saghir et al. 2024, Eqs. 5-7).

    The paper cites no code for its NGD. That it is Kaldi's online natural gradient (Povey, Zhang & Khudanpur 2015)
    is our reading of κ = α/d · tr(F). Take an axis of size d of a parameter tensor. The rows of X, (N, d), are the
    slices of the gradient along that axis, one for each index of the other axes, and F = RᵀDR + ρI, with R of r
    rows, is a moving average of XᵀX/N. The gradient is multiplied by β(F + κI)⁻¹ = I - WᵀW along its first axis,
    the result along the second, and so on; axes of size 1 are passed over. The result is rescaled to the norm of
    the gradient after each axis, so that only its direction differs from SGD's. With rescale=False it is
    β(F + κI)⁻¹X itself, which is shorter than X, and shortest in directions where gradients are large. For α -> ∞
    both are SGD at this lr (the paper's Eq. 5, which has no β, would be SGD at lr/κ).

    The first gradient updates F of each axis three times before it is multiplied. Then each of the first ten
    calls of `step`, and every update_period-th after them, updates F with its gradient after the multiplication.
    F starts at ε; but on an axis with fewer rows than the rank (a bias has one row) that would leave directions to
    rounding, and F starts at the mean square of the first gradient that is not zero.

    State of a parameter: "step", the calls so far, and for axis k "factor_k" (W, (r, d)), "eigenvalues_k"
    (D, (r,)), "rho_k" (ρ, ()). Parameters without a gradient are skipped.

    Args:
        params: float32 or float64; settings may differ between groups.
        lr: factor of the step.
        alpha: α, smoothing; Kaldi's 4 is strong, the paper uses 0.01 to 0.1; 0 is allowed.
        rank: r, at most d - 1 where an axis is shorter; None: min((d + 1) // 2, 80).
        update_period: calls between updates of F after the first ten.
        eta: η, weight of the newest gradient in F, between 0 and 1.
        epsilon: ε, floor of the eigenvalues of F (squared gradient).
        delta: δ, the same relative to the largest.
        rescale: rescale the result to the gradient's norm after each axis.
        weight_decay: added to the gradient, times the parameters, as in torch.optim.SGD: F sees the sum.
        maximize: step uphill.

    Cost of a step: 4r flops for each element and axis (2d where that is less; between updates, 2k for all axes
    together of a convolution's kernel of k <= 128 numbers). An update of F costs about half as much again, and an
    (r, r) eigendecomposition for each axis. ResNet-18 on two cores: 83 to 96 ms, 48 to 51 of them for the large
    products; LeNet-5 on one: 1.6 ms, 4 steps of Adam (`make bench-ngd-step`). Memory: 2r·d numbers for each axis,
    and r·d in double precision for those of one dimension. Two buffers, kept between steps, that hold gradients of
    one shape: 2 * 2^20 numbers, or twice the largest tensor if that is more. A copy of the gradients with
    weight_decay or maximize.
    Each step waits for the device once, to check the gradients; updates wait for their eigendecompositions, too.

    Raises:
        ValueError: a setting out of range.
        DivergedError: gradients that are not finite: no step is taken, and the state stays as it was.
        TypeError: parameters or gradients of another kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        alpha: float = 4.0,
        rank: int | None = None,
        update_period: int = 4,
        eta: float = 0.1,
        epsilon: float = 1e-10,
        delta: float = 5e-4,
        rescale: bool = True,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        self._active: list[list[int]] = []
        self._cohorts: list[list[Cohort]] = []
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "rank": rank,
            "update_period": update_period,
            "eta": eta,
            "epsilon": epsilon,
            "delta": delta,
            "rescale": rescale,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it has any."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._active, self._cohorts = [], []  # built again from the state, which may have been loaded

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss."""
        loss = evaluate(closure)
        self._find_cohorts()
        work = [
            (group, cohort, cohort.gradients(group))
            for group, of_group in zip(self.param_groups, self._cohorts, strict=True)
            for cohort in of_group
        ]
        squared_norms = [torch.stack(torch._foreach_norm(gradients)).square() for *_, gradients in work]
        _check_finite([cohort for _, cohort, _ in work], squared_norms)
        for (group, cohort, gradients), own in zip(work, squared_norms, strict=True):
            cohort.take_step(gradients, own, group, _smoothing(group))
        return loss

    def _find_cohorts(self) -> None:
        """Build the cohorts of the parameters that have gradients, when these have changed."""
        active = [
            [parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel() > 0]
            for group in self.param_groups
        ]
        known = [[id(parameter) for parameter in of_group] for of_group in active]
        if known == self._active:
            return
        for group, of_group in zip(self.param_groups, active, strict=True):
            for parameter in of_group:
                _check_gradient(parameter)
                if not self.state[parameter]:
                    self.state[parameter].update(initial_state(parameter, group["rank"], _smoothing(group)))
        self._cohorts = [cohorts(of_group, self.state) for of_group in active]
        _share_buffers([cohort for of_group in self._cohorts for cohort in of_group])
        self._active = known


def _share_buffers(all_cohorts: list[Cohort]) -> None:
    """Give all cohorts of a dtype and device the same two buffers.

    Memory that is allocated anew in each step costs more, in page faults, than the arithmetic on it.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Cohort]] = {}
    for cohort in all_cohorts:
        like = cohort.parameters[0]
        kinds.setdefault((like.dtype, like.device), []).append(cohort)
    for members in kinds.values():
        buffers = members[0].parameters[0].new_empty(2, max(cohort.buffer_size for cohort in members))
        for cohort in members:
            cohort.bind(buffers)


def _smoothing(group: dict[str, Any]) -> Smoothing:
    return Smoothing(group["alpha"], group["eta"], group["epsilon"], group["delta"])


def _check_finite(work: list[Cohort], squared_norms: list[Tensor]) -> None:
    """Raise where a gradient is not finite; wait for the device once, whatever the number of cohorts."""
    if not work:
        return
    device = squared_norms[0].device
    if math.isfinite(torch.stack([own.sum().to(device) for own in squared_norms]).sum().item()):
        return
    for cohort, own in zip(work, squared_norms, strict=True):
        for parameter, squared_norm in zip(cohort.parameters, own.tolist(), strict=True):
            if not math.isfinite(squared_norm):
                raise DivergedError(
                    f"NGD found NaN or infinity in a gradient of shape {tuple(parameter.shape)}, or one beyond "
                    "the range of its precision, and took no step: the iteration has diverged. Lower lr, or raise "
                    "alpha."
                )


def _check_gradient(parameter: Tensor) -> None:
    gradient = parameter.grad
    if parameter.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"NGD needs float32 or float64 parameters, got {parameter.dtype}: keep master weights in float32 and "
            "use torch.autocast for the forward pass."
        )
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError("NGD needs dense gradients, got sparse ones: use nn.Embedding(sparse=False).")


def _check(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"lr must not be negative, got {group['lr']}")
    if not group["alpha"] >= 0:
        raise ValueError(f"alpha must not be negative, got {group['alpha']}; the paper uses 0.01 to 0.1, Kaldi 4")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
    if not 0 < group["eta"] < 1:
        raise ValueError(f"eta is the weight of the newest gradient and lies between 0 and 1, got {group['eta']}")
    if not group["epsilon"] > 0 or not 0 < group["delta"] < 1:
        raise ValueError(
            f"epsilon must be positive and delta between 0 and 1, got {group['epsilon']} and {group['delta']}: "
            "they keep the eigenvalues of F away from zero"
        )
    if group["update_period"] < 1 or (group["rank"] is not None and group["rank"] < 1):
        raise ValueError(
            f"update_period and rank must be at least 1, got {group['update_period']} and {group['rank']}; "
            "rank=None chooses min((d + 1) // 2, 80) for each axis"
        )
