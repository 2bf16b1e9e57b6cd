"""The PBRF of a small weight, at its minimum: the question that influence answers to first order.

Leaving a point out is a weight of 1/N, for which Eq. 8 may have no minimum. For a fraction f of it the minimum is
there and Newton's method finds it; divided by f, its changes of test losses tend to the first-order ones of
influence with the Gauss-Newton matrix as f goes to 0 (Eq. 46). How far they agree says that the influence estimate
is solved, and that what parts it from the PBRF at 1/N is the size of the weight, or a descent that stopped early.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from curvlab.influence import ProximalBregmanObjective, ProximalNewton, loss_response
from curvlab.solvers import BlockConjugateGradient
from experiments.pbrf.decomposition import Decomposition


@dataclass(frozen=True)
class SmallWeight:
    """The minimum for each point.

    Attributes:
        changes: of the test losses, scaled up to a weight of 1/N, (num_test, K).
        gradient_norm: ‖∇Q‖ over all examples, over that at θ^s, (K,).
    """

    changes: Tensor
    gradient_norm: Tensor


def small_weight(points: Decomposition) -> SmallWeight | None:
    """Return the minimum for a weight of `small_weight.fraction`/N; None where that is not set. A unit of work."""
    network = points.network
    settings = network.settings.get("small_weight")
    if settings is None:
        return None
    key = points.key | {"small_weight": dict(settings), "num_test": len(network.test[1])}
    about = f"PBRF of a small weight, {network.label}, seed {network.seed}"
    found = network.run.unit("pbrf/small_weight", key, partial(_small_weight, points), version=1, about=about)
    return SmallWeight(found["changes"], found["gradient_norm"])


def linearised_minimum(points: Decomposition) -> Tensor:
    """Return the changes of the test losses at the minimum of the linearised PBRF, (num_test, K). A unit of work.

    That minimum is the influence estimate with the Gauss-Newton matrix (Eq. 46): the changes differ from the
    predicted ones in that the test losses are not linear in the parameters.
    """
    network, columns = points.network, points.influence("gauss_newton")[0].double().T

    def compute() -> dict[str, Any]:
        return {"changes": loss_response(network.model, network.loss, network.test, columns, epsilon=1.0).cpu()}

    solver = dict(network.settings.influence["gauss_newton"])
    key = points.key | {"solver": solver, "num_test": len(network.test[1])}
    changes: Tensor = network.run.unit("pbrf/linearised_minimum", key, compute, version=1)["changes"]
    return changes


def _small_weight(points: Decomposition) -> dict[str, Any]:
    network, settings = points.network, points.network.settings.small_weight
    (inputs, targets), indices = network.train, points.points
    epsilon = -settings.fraction / len(targets)  # ours up-weights
    objective = ProximalBregmanObjective(
        network.model,
        network.loss,
        network.train,
        (inputs[indices], targets[indices]),
        damping=network.settings.damping + network.settings.training.weight_decay,  # see `LeftOut`
        epsilon=epsilon,
    )
    newton = ProximalNewton(
        rtol=settings.rtol, max_steps=settings.max_steps, solver=BlockConjugateGradient(rtol=1e-2, max_steps=500)
    )
    found = newton.minimize(objective)
    network.run.add_matvecs(found.num_matvecs)
    columns = found.displacement
    changes = loss_response(network.model, network.loss, network.test, columns, epsilon=epsilon)
    return {"changes": (-changes / len(targets)).cpu(), "gradient_norm": found.gradient_norm.double().cpu()}
