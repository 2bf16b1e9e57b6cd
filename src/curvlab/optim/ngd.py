"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.ngd_axis import AxisFisher, Smoothing
from curvlab.optim.ngd_bucket import Bucket, Workspace, group_by_shape, initial_state, squared_norms
from curvlab.optim.ngd_update import AxisUpdate, update_estimates
from curvlab.optim.parameter_vector import Closure, DivergedError, evaluate

_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins


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
    products. Memory: r·d numbers for each axis. Two buffers, kept between steps, that hold gradients of one shape:
    2 * 2^20 numbers, or twice the largest tensor if that is more. A copy of the gradients with weight_decay or
    maximize.
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
        self._buckets: dict[int, tuple[list[int], list[Bucket]]] = {}
        self._workspace = Workspace()
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
        self._buckets = {}  # built again from the state, which may have been loaded
        self._workspace = Workspace()

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss."""
        loss = evaluate(closure)
        work = [
            [_BucketStep.of(bucket, group) for bucket in self._group_buckets(index, group)]
            for index, group in enumerate(self.param_groups)
        ]
        _check_finite([part for of_group in work for part in of_group])
        for group, of_group in zip(self.param_groups, work, strict=True):
            updates: list[AxisUpdate] = []
            for part in of_group:
                updates += _take_step(part, group, self._workspace)
                for parameter in part.bucket.parameters:
                    self.state[parameter]["step"] = part.bucket.step
            update_estimates(updates, _smoothing(group))
        return loss

    def _group_buckets(self, index: int, group: dict[str, Any]) -> list[Bucket]:
        """Return the buckets of the parameters that have gradients, built again when these have changed."""
        active = [
            parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel() > 0
        ]
        known, buckets = self._buckets.get(index, ([], []))
        if known != [id(parameter) for parameter in active]:
            for parameter in active:
                _check_gradient(parameter)
                if not self.state[parameter]:
                    self.state[parameter].update(initial_state(parameter, group["rank"], _smoothing(group)))
            buckets = [Bucket.of(members, self.state) for members in group_by_shape(active, self.state)]
            self._buckets[index] = ([id(parameter) for parameter in active], buckets)
        return buckets


def _smoothing(group: dict[str, Any]) -> Smoothing:
    return Smoothing(group["alpha"], group["eta"], group["epsilon"], group["delta"])


@dataclass(frozen=True)
class _BucketStep:
    """What one step does with a bucket.

    Attributes:
        bucket: parameters of one shape.
        gradients: theirs, with weight decay and uphill where asked for.
        squared_norms: ‖gradient‖² of each, (B,).
        updates_estimates: whether F learns from these gradients.
    """

    bucket: Bucket
    gradients: list[Tensor]
    squared_norms: Tensor
    updates_estimates: bool

    @classmethod
    def of(cls, bucket: Bucket, group: dict[str, Any]) -> _BucketStep:
        gradients = bucket.gradients(maximize=group["maximize"], weight_decay=group["weight_decay"])
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        updates = bucket.step < _INITIAL_UPDATES or bucket.step % group["update_period"] == 0
        return cls(bucket, gradients, norms.square(), bool(updates))


def _check_finite(work: list[_BucketStep]) -> None:
    if not work:
        return
    # One wait for the device, whatever the number of buckets.
    device = work[0].squared_norms.device
    finite = torch.stack([part.squared_norms.isfinite().all().to(device) for part in work]).tolist()
    for part, is_finite in zip(work, finite, strict=True):
        if not is_finite:
            raise DivergedError(
                f"NGD found NaN or infinity in a gradient of shape {tuple(part.bucket.parameters[0].shape)}, or "
                "one beyond the range of its precision, and took no step: the iteration has diverged. Lower lr, "
                "or raise alpha."
            )


def _take_step(part: _BucketStep, group: dict[str, Any], workspace: Workspace) -> list[AxisUpdate]:
    """Move the parameters of a bucket; return what F of each axis has to learn from their gradients."""
    bucket = part.bucket
    x, scratch = workspace.views(bucket.parameters[0], bucket.shape)
    updates: list[AxisUpdate] = []
    if part.updates_estimates:
        bucket.stack(part.gradients, out=x)
        x, updates = _multiply_and_observe(part, x, scratch, group)
    else:
        # Products along different axes commute, and nothing but the result matters here.
        bucket.stack_multiplied(part.gradients, out=x)
        for fisher in bucket.fishers[: len(bucket.fishers) - bucket.num_kernel_fishers]:
            x, scratch, _ = fisher.apply_(x, scratch, with_product=False)
    factors = torch.full_like(part.squared_norms, -float(group["lr"]))
    if group["rescale"] and bucket.fishers:
        factors = factors * _ratio(part.squared_norms, squared_norms(x)).sqrt()
    bucket.move(x, factors)
    bucket.step += 1
    return updates


def _multiply_and_observe(
    part: _BucketStep, x: Tensor, scratch: Tensor, group: dict[str, Any]
) -> tuple[Tensor, list[AxisUpdate]]:
    """Multiply `x` along axis after axis; return the result and, for each axis, what F has to learn from its X.

    The products are linear, so the rescaling of all axes is done once, at the end. Until then the X of an axis is
    `x` times sqrt(pending).
    """
    updates: list[AxisUpdate] = []
    for index, fisher in enumerate(part.bucket.fishers):
        squared_norm = squared_norms(x) if index else part.squared_norms
        pending = _ratio(part.squared_norms, squared_norm) if group["rescale"] else torch.ones_like(squared_norm)
        for _ in range(_START_UPDATES if part.bucket.step == 0 else 0):
            *_, product = fisher.apply_(x.clone(), torch.empty_like(x), with_product=True)
            update_estimates([_update(fisher, product, squared_norm, pending)], _smoothing(group))
        x, scratch, product = fisher.apply_(x, scratch, with_product=True)
        updates.append(_update(fisher, product, squared_norm, pending))
    return x, updates


def _update(fisher: AxisFisher, product: Tensor | None, squared_norm: Tensor, pending: Tensor) -> AxisUpdate:
    if product is None:
        raise TypeError("an update needs the product J")
    return AxisUpdate(fisher, pending[:, None, None] * product, pending * squared_norm)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)


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
