"""What parts influence from the PBRF: the descent's length, and that leaving a point out is no small weight.

Carried on. Descent goes 1 - exp(-ηT(μ + λ)) of the way to a quadratic's minimum along a direction of curvature μ,
so that ηλT, the horizon, says how far it gets where the network is flat: 0.004 with K/2 = 50 epochs of 8 steps at
a rate of 0.01 and λ = 0.001. Here Eq. 8 is minimised at the base run's learning rate (not divided) with momentum
β, for as many steps as give a horizon of ηλT/(1 - β). Every step sees all examples: in batches of 64, with
momentum, the gradients of all points grew. At ε = 1/N Eq. 8 may have no minimum (see `ProximalBregmanCost`). So
each point says how far it came: the norm of the objective's gradient over all examples at the end, over that at
θ^s. A point that gets further from θ^s than `MAX_DISTANCE` times its influence estimate, the minimum of the
linearised objective, is let go: it has left.

Small weight. For a fraction f of 1/N the minimum is there and Newton's method finds it; divided by f, its changes
of test losses tend to the first-order ones of influence with the Gauss-Newton matrix as f goes to 0 (Eq. 46).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.influence import ProximalBregmanObjective, ProximalNewton, loss_response
from curvlab.influence.retraining import ProximalBregmanCost, SharedBatches
from curvlab.lab import unit
from curvlab.solvers import BlockConjugateGradient
from experiments.pbrf.responses import Decomposition, over_all

MAX_DISTANCE = 10.0  # of a point from θ^s, in units of its influence estimate
REACHED = 0.1  # relative gradient norm up to which a point counts as at its minimum


# ------------------------------------------------------------------------------------ carried on
class Bounded:
    """An objective without pull on points further away than a bound (K,), so that one that leaves stops no other.

    Examples are taken some at a time, see `over_all`, so that a step may see all of them.
    """

    def __init__(self, objective: Any, bound: Tensor) -> None:
        self.objective, self.bound = objective, bound

    @property
    def depends_on(self) -> Mapping[str, Any]:
        """Return what it is made of, as settings of a checkpoint."""
        return {**self.objective.depends_on, "bound": self.bound.tolist()}

    def __call__(self, displacement: Tensor, indices: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P), zero for what is beyond the bound."""
        gone = displacement.norm(dim=1) > self.bound
        values, gradients = over_all(self.objective, displacement.masked_fill(gone[:, None], 0.0), indices)
        return values.masked_fill(gone, 0.0), gradients.masked_fill(gone[:, None], 0.0)


def carried_on(points: Decomposition) -> dict[str, Tensor] | None:
    """Return the PBRF carried on; None where the task has no `carried_on`, or no SGD. A unit of work.

    Keys: `changes` of the test losses, (num_test, K); `gradient_norm`, ‖∇Q‖ over all examples over that at θ^s,
    (K,); `distance` from θ^s over that of the influence estimate with the Gauss-Newton matrix, (K,); `fall` of the
    objective over that of the linearised one down to its minimum, (K,): far above 1 only where it is far from
    quadratic. `carried_on.horizon` is ηλT/(1 - β), `carried_on.momentum` β.
    """
    network = points.network
    settings = network.settings.get("carried_on")
    if settings is None or network.settings.training.optimizer != "sgd":
        return None
    key = {"num_test": len(network.test[1]), "damping": network.settings.damping}
    return _carried_on(points, carried_on=dict(settings), **key)


def num_steps(lr: float, damping: float, *, horizon: float, momentum: float) -> int:
    """Return the smallest T with ηλT/(1 - β) >= horizon."""
    return math.ceil(horizon * (1 - momentum) / (lr * damping) - 1e-9)


@unit("pbrf/carried_on", version=3, about="PBRF carried on, {seed_name}, seed {network_seed}", resumes=True)
def _carried_on(points: Decomposition, /, *, checkpoint: Path, **_: Any) -> dict[str, Any]:
    network, settings, size = points.network, points.network.settings.carried_on, points.left_out.num_examples
    influence = points.displacement("gauss_newton")
    damping = network.settings.damping + network.settings.training.weight_decay
    wanted = num_steps(network.lr, damping, horizon=settings.horizon, momentum=settings.momentum)
    minimizer = SharedBatches(
        [torch.arange(size)] * wanted,
        lr=network.lr,
        momentum=settings.momentum,
        checkpoint=checkpoint / "carried_on.pt",
        progress=network.run.bar(f"PBRF carried on, {network.described}"),
    )
    objective, start = ProximalBregmanCost(points.left_out), torch.zeros_like(influence)
    end = minimizer(Bounded(objective, MAX_DISTANCE * influence.norm(dim=1)), start, size)
    first, last = (over_all(objective, place, torch.arange(size)) for place in (start, end))
    linearised_fall = -0.5 * (points.left_out.pull * influence).sum(1)  # ½ gᵀ(G + λ)⁻¹g
    return {
        "changes": loss_response(network.model, network.loss, network.test, end.double().T, epsilon=1.0).cpu(),
        "gradient_norm": (last[1].norm(dim=1) / first[1].norm(dim=1)).double().cpu(),
        "distance": (end.norm(dim=1) / influence.norm(dim=1)).double().cpu(),
        "fall": ((first[0] - last[0]) / linearised_fall).double().cpu(),
    }


# ------------------------------------------------------------------------------------ small weight
def small_weight(points: Decomposition) -> dict[str, Tensor] | None:
    """Return the minimum for a weight of `small_weight.fraction`/N; None where that is not set. A unit of work.

    Keys: `changes` of the test losses, scaled up to a weight of 1/N, (num_test, K); `gradient_norm`, ‖∇Q‖ over all
    examples over that at θ^s, (K,).
    """
    network = points.network
    settings = network.settings.get("small_weight")
    if settings is None:
        return None
    key = {"num_test": len(network.test[1]), "damping": network.settings.damping}
    return _small_weight(points, small_weight=dict(settings), **key)


@unit("pbrf/small_weight", version=2, about="PBRF of a small weight, {seed_name}, seed {network_seed}")
def _small_weight(points: Decomposition, /, **_: Any) -> dict[str, Any]:
    network, settings = points.network, points.network.settings.small_weight
    (inputs, targets), indices = network.train, points.points
    epsilon = -settings.fraction / len(targets)  # ours up-weights
    objective = ProximalBregmanObjective(
        network.model,
        network.loss,
        network.train,
        candidates=(inputs[indices], targets[indices]),
        damping=network.settings.damping + network.settings.training.weight_decay,  # see `LeftOut`
        epsilon=epsilon,
    )
    solver = BlockConjugateGradient(rtol=1e-2, max_steps=500)
    newton = ProximalNewton(rtol=settings.rtol, max_steps=settings.max_steps, solver=solver)
    found = newton.minimize(objective)
    network.run.add_matvecs(found.num_matvecs)
    changes = loss_response(network.model, network.loss, network.test, found.displacement, epsilon=epsilon)
    return {"changes": (-changes / len(targets)).cpu(), "gradient_norm": found.gradient_norm.double().cpu()}
