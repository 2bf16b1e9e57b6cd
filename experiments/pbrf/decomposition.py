"""Units of work: the responses of one network to leaving points out one by one, their gaps and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from curvlab.influence import directional_derivatives, loss_response
from curvlab.influence.retraining import (
    GAPS,
    DownweightedCost,
    Gap,
    LeftOut,
    cold_optimum,
    curvature_operator,
    influence_estimate,
    linearised_proximal_bregman_warm_optimum,
    output_gaps,
    proximal_bregman_warm_optimum,
    proximal_warm_optimum,
    two_stage_optimum,
    warm_optimum,
)
from curvlab.spectrum import top_eigenvalues
from experiments.pbrf.constant_loss import constant_loss
from experiments.pbrf.networks import NOTHING, Network

DENSE = 5000  # parameters up to which all eigenvalues of the Hessian are computed, as `Direct` solves
RETRAINED = {
    "warm": warm_optimum,
    "proximal": proximal_warm_optimum,
    "proximal_bregman": proximal_bregman_warm_optimum,
    "linearised": linearised_proximal_bregman_warm_optimum,
}


@dataclass(frozen=True)
class Decomposition:
    """Responses to leaving `num_points` random training points out, one by one, each computed when asked for.

    A response is stored with its displacements, (K, P) numbers: 150 MB for 20 points of two million parameters in
    single precision.

    Attributes:
        network: at θ^s.
        num_points: K.
    """

    network: Network
    num_points: int

    @cached_property
    def points(self) -> Tensor:
        """The K training points, (K,)."""
        network = self.network
        generator = network.run.generator("pbrf points", network.settings.seed_name, network.seed)
        return torch.randperm(len(network.train[1]), generator=generator)[: self.num_points]

    @cached_property
    def left_out(self) -> LeftOut:
        """Each point left out by itself."""
        return self.network.left_out(list(self.points[:, None]))

    @property
    def key(self) -> dict[str, Any]:
        """What responses depend on."""
        settings = self.network.settings
        return self.network.key | {"num_points": self.num_points, "damping": settings.damping}

    def response(self, name: str) -> Tensor:
        """Return displacements from θ^s, (K, P): cold, warm, proximal, proximal_bregman, linearised, two_stage."""
        if name == "two_stage":
            warm = self._stored("warm")
            return two_stage_optimum(warm[:-1], warm[-1])
        found = self._stored(name)
        return found[:-1] if name == "warm" else found

    def influence(self, curvature: str) -> tuple[Tensor, float]:
        """Return the displacements of the influence estimate, (K, P), and its largest relative residual."""
        solver = dict(self.network.settings.influence[curvature])
        key = self.key | {"curvature": curvature, "solver": solver}
        compute, about = partial(self._influence, curvature), f"influence by {curvature}, {self._of}"
        found = self.network.run.unit("pbrf/influence", key, compute, version=1, about=about)
        return found["displacement"].to(self.left_out.base), found["residual"]

    def gaps(self, curvature: str) -> dict[str, Tensor]:
        """Return the five gaps, (K, 2) each: per example (divided by √N) and as they are."""
        responses = {name: self.response(name) for name, _ in GAPS.values()}
        responses["influence"] = self.influence(curvature)[0]

        def compute() -> dict[str, Any]:
            found = output_gaps(self.network.model, self._gap_data(), responses)
            return {name: self._both_norms(found["-".join(pair)]) for name, pair in GAPS.items()}

        settings = self.network.settings
        key = self._influence_key(curvature) | {"gap_examples": settings.gap_examples}
        key |= {"bregman_lr_divisor": settings.bregman_lr_divisor}
        return self.network.run.unit("pbrf/gaps", key, compute, version=2)

    def moved(self, curvature: str) -> Tensor:
        """Return how far the influence estimate moves the outputs, (K, 2), as a gap."""
        return self._distance(self.influence(curvature)[0], None, self._influence_key(curvature))

    def moved_by(self, name: str) -> Tensor:
        """Return how far a response moves the outputs from those of θ^s, (K, 2), as a gap."""
        return self._distance(self.response(name), None, self._response_key(name))

    def solver_error(self, curvature: str) -> Tensor:
        """Return the last of the gaps by itself, (K, 2): no other response than the linearised one is needed."""
        key = self._influence_key(curvature) | self._response_key("linearised")
        return self._distance(self.influence(curvature)[0], self.response("linearised"), key)

    def hessian_spectrum(self) -> dict[str, float]:
        """Return `smallest`, `num_below` and `nearest` of the eigenvalues μ of the cost's Hessian at θ^s, with L2.

        How many lie below -λ, and min |μ + λ|: where any lie below, H + λI has no minimum to offer, and where one
        lies near -λ, its inverse has no bound. Above `DENSE` parameters only the smallest eigenvalue is estimated,
        by Lanczos, from above; the other two are nan.
        """
        network, damping = self.network, self.network.settings.damping
        left_out = network.left_out([NOTHING])
        operator = curvature_operator(left_out, "hessian")

        def compute() -> dict[str, Any]:
            if len(network.initial) <= DENSE:
                dense = operator.to_dense().double()
                return {"eigenvalues": torch.linalg.eigvalsh((dense + dense.T) / 2).cpu() - damping}
            generator = network.run.generator("pbrf lanczos", network.settings.seed_name, network.seed)
            found = top_eigenvalues(-1.0 * operator, rtol=1e-2, max_matvecs=60, generator=generator)
            network.run.add_matvecs(found.num_matvecs)
            return {"eigenvalues": -found.values - damping}

        about = f"eigenvalues of the Hessian, {self._of}"
        found = network.run.unit("pbrf/hessian_spectrum", network.key, compute, version=1, about=about)[
            "eigenvalues"
        ]
        known = len(found) == len(network.initial)
        return {
            "smallest": float(found.min()),
            "num_below": float((found < -damping).sum()) if known else math.nan,
            "nearest": float((found + damping).abs().min()) if known else math.nan,
        }

    def with_damping(self, damping: float) -> Decomposition:
        """Return the same network and points with another damping."""
        settings = self.network.settings.copy()
        settings.damping = damping
        return replace(self, network=replace(self.network, settings=settings))

    def loss_changes(self, name: str) -> Tensor:
        """Return the changes of the test losses when the network moves to a response, (num_test, K)."""
        network, columns = self.network, self.response(name).double().T

        def compute() -> dict[str, Any]:
            return {"changes": loss_response(network.model, network.loss, network.test, columns, epsilon=1.0)}

        key = self._response_key(name) | {"num_test": len(self.network.test[1])}
        return self.network.run.unit("pbrf/loss_changes", key, compute, version=1)["changes"]

    def predicted_changes(self, curvature: str) -> Tensor:
        """Return the first-order changes of the test losses by influence, Eq. 20, (num_test, K)."""
        network, columns = self.network, self.influence(curvature)[0].T

        def compute() -> dict[str, Any]:
            return {
                "changes": directional_derivatives(network.model, network.loss, network.test, columns).double()
            }

        key = self._influence_key(curvature) | {"num_test": len(self.network.test[1])}
        return self.network.run.unit("pbrf/predicted_changes", key, compute, version=1)["changes"]

    def base_state(self) -> dict[str, float]:
        """Return, at θ^s, training loss (without L2), gradient norm of the cost (with L2), and test loss.

        With `constant_loss`, the training loss of the best constant outputs: above it nothing was learned.
        """

        def compute() -> dict[str, Any]:
            network = self.network
            left_out = network.left_out([NOTHING])
            zeros = torch.zeros_like(left_out.base)[None]
            cost, size = DownweightedCost(left_out), left_out.num_examples
            gradient = torch.zeros_like(zeros)
            for indices in torch.arange(size).split(512):
                gradient += cost(zeros, indices)[1] * (len(indices) / size)
            test = LeftOut(network.model, network.loss, network.test, [NOTHING], damping=1.0)
            return {
                "train_loss": float(left_out.losses.start_losses.mean()),
                "gradient_norm": float(gradient.norm()),
                "test_loss": float(test.losses.start_losses.mean()),
                "constant_loss": constant_loss(network.loss, network.train[1]),
            }

        key = self.network.key | {"num_test": len(self.network.test[1])}
        return self.network.run.unit("pbrf/base_state", key, compute, version=2)

    def _stored(self, name: str) -> Tensor:
        key = self._response_key(name)
        compute, about = partial(self._respond, name), f"{name} response, {self._of}"
        stored = self.network.run.unit("pbrf/response", key, compute, version=1, about=about, resumes=True)
        return stored["displacement"].to(self.left_out.base)

    def _response_key(self, name: str) -> dict[str, Any]:
        divisor = self.network.settings.bregman_lr_divisor
        bregman = {"bregman_lr_divisor": divisor} if name in ("proximal_bregman", "linearised") else {}
        return self.key | {"response": name} | bregman

    def _influence_key(self, curvature: str) -> dict[str, Any]:
        return self.key | {"curvature": curvature, "solver": dict(self.network.settings.influence[curvature])}

    @property
    def _of(self) -> str:
        return f"{self.network.label}, seed {self.network.seed}"

    def _respond(self, name: str, unfinished: Path) -> dict[str, Any]:
        network = self.network
        minimizer = network.minimizer(name, unfinished)
        if name == "cold":
            return {"displacement": cold_optimum(self.left_out, minimizer, initial=network.initial).cpu()}
        # The retraining with nothing left out that D.2 subtracts goes along as one more group.
        groups = [*self.points[:, None], NOTHING] if name == "warm" else list(self.points[:, None])
        return {"displacement": RETRAINED[name](network.left_out(groups), minimizer).cpu()}

    def _influence(self, curvature: str) -> dict[str, Any]:
        network = self.network
        solver = instantiate(network.settings.influence[curvature])
        generator = network.run.generator("pbrf influence", network.settings.seed_name, network.seed)
        found, solution = influence_estimate(self.left_out, solver, curvature=curvature, generator=generator)  # type: ignore[arg-type]
        network.run.add_matvecs(solution.num_matvecs)
        return {"displacement": found.cpu(), "residual": float(solution.residual.max())}

    def _distance(self, first: Tensor, second: Tensor | None, key: dict[str, Any]) -> Tensor:
        """Return the gap between two responses, (K, 2); without a second one, between the first and θ^s."""
        both = {"first": first, "second": torch.zeros_like(first) if second is None else second}

        def compute() -> dict[str, Any]:
            return {
                "distance": self._both_norms(
                    output_gaps(self.network.model, self._gap_data(), both)["first-second"]
                )
            }

        key |= {"gap_examples": self.network.settings.gap_examples, "from_base": second is None}
        return self.network.run.unit("pbrf/distance", key, compute, version=1)["distance"]

    def _both_norms(self, gap: Gap) -> Tensor:
        """Return (K, 2): per example, and over all N examples, also where only a part of them was compared."""
        return torch.stack([gap.per_example, gap.per_example * len(self.network.train[1]) ** 0.5], dim=1)

    def _gap_data(self) -> tuple[Tensor, Tensor]:
        network = self.network
        inputs, targets = network.train
        wanted = network.settings.gap_examples
        if wanted is None or wanted >= len(targets):
            return inputs, targets
        generator = network.run.generator("pbrf gap examples", network.settings.seed_name)
        chosen = torch.randperm(len(targets), generator=generator)[:wanted]
        return inputs[chosen], targets[chosen]
