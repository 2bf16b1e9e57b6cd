"""The linear systems of App. G: damped curvature at θ^s, gradients of training points, exact solutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from curvlab.lab import unit
from curvlab.spectrum import top_eigenvalues
from experiments.pbrf.networks import Network
from experiments.shared.systems import Systems

# The Hessian at θ^s is indefinite: its damping is at least this many times -λmin, so that it is positive definite.
HESSIAN_MARGIN = 2.0


@dataclass(frozen=True)
class NetworkSystems(Systems):
    """The systems of a network at θ^s, with B the gradients of K random training points' losses.

    Attributes:
        spectrum: the `largest` eigenvalue of A, and the `smallest`: measured of the Hessian, 0 of G (to Lanczos'
            1 %).
    """

    spectrum: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, matrix: str) -> NetworkSystems:
        """Return them with the config's damping and the L2 of training, or what makes the Hessian definite."""
        settings, generator = network.settings, network.generator("pbrf points", network.seed)
        points = torch.randperm(len(network.train[1]), generator=generator)[: settings.num_points]
        inputs, targets = network.train
        undamped = cls(network, 0.0, (inputs[points], targets[points]), network.test, matrix)
        spectrum = _spectrum(network, undamped, curvature=matrix)
        added = float(settings.damping + settings.training.weight_decay)
        damping = added if spectrum["smallest"] + added > 0 else -HESSIAN_MARGIN * spectrum["smallest"]
        return replace(undamped, damping=damping, spectrum=spectrum)

    @property
    def key(self) -> dict[str, Any]:
        """What they depend on."""
        sizes = {name: self.task.settings[name] for name in ("num_points", "num_test")}
        return self.task.key | sizes | {"curvature": self.matrix, "damping": self.damping}

    @property
    def described(self) -> str:
        """For the terminal."""
        return f"{self.task.label}, {self.matrix}, seed {self.task.seed}"

    @cached_property
    def right_hand_sides(self) -> Tensor:
        """B, (P, K), contiguous."""
        return super().right_hand_sides.contiguous()

    @cached_property
    def reference(self) -> dict[str, Any]:
        """`solutions` (P, K) in double precision, and their largest relative `residual`."""
        return _reference(self, solver=dict(self.task.settings.reference[self.matrix]))


@unit("pbrf/appg_spectrum", version=1, about="spectrum of {seed_name}, {curvature}, seed {network_seed}")
def _spectrum(network: Network, systems: NetworkSystems, /, **_: Any) -> dict[str, float]:
    run = network.run
    generator = network.generator("pbrf appg spectrum", network.seed)
    largest = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=generator)
    run.add_matvecs(largest.num_matvecs)
    if systems.matrix == "gauss_newton":
        return {"largest": float(largest.values[0]), "smallest": 0.0}
    negative = top_eigenvalues(-systems.operator, 1, rtol=0.01, generator=generator)
    run.add_matvecs(negative.num_matvecs)
    return {"largest": float(largest.values[0]), "smallest": -float(negative.values[0])}


@unit("pbrf/appg_reference", version=1, about="exact solutions {seed_name}, {curvature}, seed {network_seed}")
def _reference(systems: NetworkSystems, /, *, solver: dict[str, Any], **_: Any) -> dict[str, Any]:
    exact, network = systems.in_double_precision(), systems.task
    generator = network.generator("pbrf appg reference", network.seed)
    solution = instantiate(solver).solve(exact.damped, exact.right_hand_sides, generator=generator)
    network.run.add_matvecs(solution.num_matvecs)
    return {"solutions": solution.x.cpu(), "residual": float(solution.residual.max())}
