"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.ngd_axis import AxisFisher, Smoothing
from curvlab.optim.ngd_bucket import Bucket, Workspace, alike, initial_state
from curvlab.optim.ngd_update import AxisUpdate, absorb
from curvlab.optim.parameter_vector import Closure, DivergedError, evaluate

_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins


class NGD(torch.optim.Optimizer):
    """w <- w - lr · (F + κI)⁻¹ ∇L, F estimated per axis of each parameter tensor (Saghir et al. 2024, Eqs. 5-7).

    The paper cites no code for its NGD; that it is Kaldi's online natural gradient (Povey, Zhang & Khudanpur
    2015) is our reading of κ = α/d · tr(F). For an axis of size d the gradient's slices along the other axes are
    the rows of X, (N, d), and F = RᵀDR + ρI of rank r is a moving average of XᵀX/N. The gradient is multiplied
    by β(F + κI)⁻¹ = I - WᵀW, one axis after the other, each on the output of the one before; axes of size 1 are
    left alone. Every output is rescaled to the norm of the gradient, so only its direction differs from SGD's;
    with rescale=False it is β(F + κI)⁻¹X itself, which only shrinks, dominant directions most. For α -> ∞ both
    are SGD at this lr (the paper's Eq. 5 without β would be SGD at lr/κ).

    Each axis starts with three updates on its first gradient; then the first ten calls update F after taking
    their output, after that every update_period-th. Axes with fewer rows than the rank (biases: one row) start
    from the mean square of their first gradient that is not zero instead of from ε, which would leave
    directions to rounding.

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
        rescale: rescale every output to the gradient's norm.

    Cost of a step: 4r flops an element and axis (2d where less; where nothing is updated, 2k for all axes together
    of a convolution's kernel of k <= 128 numbers), in an update about 1.5 times that and, once for each axis, an
    (r, r) eigendecomposition. On two cores, ResNet-18: 83 to 96 ms, the large products alone 48 to 51.
    Memory: r·d numbers an axis, and twice the gradients of equal shape, at most 2 * 2^20 numbers in all (more only
    for a tensor that is itself larger), kept between steps.
    Nothing waits for the device, but an update, for its check of the gradients and its eigendecompositions.

    Raises:
        ValueError: a setting out of range.
        DivergedError: gradients that are not finite, in an update: no step is taken.
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
        buckets = [self._group_buckets(index, group) for index, group in enumerate(self.param_groups)]
        norms = [[bucket.squared_gradient_norms() for bucket in of_group] for of_group in buckets]
        for group, of_group, squared in zip(self.param_groups, buckets, norms, strict=True):
            for bucket, initial in zip(of_group, squared, strict=True):
                if _updates(bucket, group) and not bool(initial.isfinite().all()):
                    raise DivergedError(
                        f"NGD found NaN or infinity in a gradient of shape {tuple(bucket.parameters[0].shape)}, "
                        "or one beyond the range of its precision, and took no step: the iteration has diverged. "
                        "Lower lr, or raise alpha."
                    )
        for group, of_group, squared in zip(self.param_groups, buckets, norms, strict=True):
            updates: list[AxisUpdate] = []
            for bucket, initial in zip(of_group, squared, strict=True):
                updates += _step(bucket, initial, group, self._workspace)
                for parameter in bucket.parameters:
                    self.state[parameter]["step"] = bucket.step
            absorb(updates, _smoothing(group))
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
            buckets = [Bucket.of(members, self.state) for members in alike(active, self.state)]
            self._buckets[index] = ([id(parameter) for parameter in active], buckets)
        return buckets


def _smoothing(group: dict[str, Any]) -> Smoothing:
    return Smoothing(group["alpha"], group["eta"], group["epsilon"], group["delta"])


def _updates(bucket: Bucket, group: dict[str, Any]) -> bool:
    """Whether this call brings the gradients into the estimates."""
    return bool(bucket.step < _INITIAL_UPDATES or bucket.step % group["update_period"] == 0)


def _step(bucket: Bucket, initial: Tensor, group: dict[str, Any], workspace: Workspace) -> list[AxisUpdate]:
    """Move the parameters of a bucket; return what their gradients, of norm² `initial`, bring to its estimates."""
    x, spare = workspace.views(bucket.parameters[0], bucket.shape)
    updates: list[AxisUpdate] = []
    if _updates(bucket, group):
        bucket.stack_gradients(x)
        x, updates = _apply_all_with_updates(bucket, initial, x, spare, group)
    else:
        # Linear maps of different axes commute, and nothing but the result matters here.
        bucket.stack_projected_gradients(x)
        for fisher in bucket.fishers[: len(bucket.fishers) - bucket.num_kernel_fishers]:
            x, spare, _ = fisher.apply_(x, spare, with_product=False)
    factors = torch.full_like(initial, -float(group["lr"]))
    if group["rescale"] and bucket.fishers:
        factors = factors * _ratio(initial, _squared_norms(x)).sqrt()
    bucket.move(x, factors)
    bucket.step += 1
    return updates


def _apply_all_with_updates(
    bucket: Bucket, initial: Tensor, x: Tensor, spare: Tensor, group: dict[str, Any]
) -> tuple[Tensor, list[AxisUpdate]]:
    """Multiply axis after axis; return the result and, for each axis, what it has seen.

    Linear maps commute with factors, so the rescaling of all axes is done once, at the end; until then an axis
    sees x times sqrt(pending).
    """
    updates: list[AxisUpdate] = []
    for index, fisher in enumerate(bucket.fishers):
        squared_norm = _squared_norms(x) if index else initial
        pending = _ratio(initial, squared_norm) if group["rescale"] else torch.ones_like(initial)
        for _ in range(_START_UPDATES if bucket.step == 0 else 0):
            *_, product = fisher.apply_(x.clone(), torch.empty_like(x), with_product=True)
            absorb([_update(fisher, product, squared_norm, pending)], _smoothing(group))
        x, spare, product = fisher.apply_(x, spare, with_product=True)
        updates.append(_update(fisher, product, squared_norm, pending))
    return x, updates


def _update(fisher: AxisFisher, product: Tensor | None, squared_norm: Tensor, pending: Tensor) -> AxisUpdate:
    if product is None:
        raise TypeError("an update needs the product J")
    return AxisUpdate(fisher, pending[:, None, None] * product, pending * squared_norm)


def _squared_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.view(len(x), -1), dim=1).square()


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
