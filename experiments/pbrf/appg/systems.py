"""The linear systems of App. G: damped curvature at θ^s, gradients of training points, exact solutions."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.influence import per_example_gradients
from curvlab.linalg import LinearOperator, identity
from curvlab.spectrum import top_eigenvalues
from experiments.pbrf.networks import Network

MATRICES = {"gauss_newton": GaussNewtonOperator, "hessian": HessianOperator}
# The Hessian at θ^s is indefinite: its damping is at least this many times -λmin, so that it is positive definite.
HESSIAN_MARGIN = 2.0


@dataclass(frozen=True)
class Systems:
    """(A + damping I) X = B, with B the gradients of K random training points' losses.

    Attributes:
        network: at θ^s.
        curvature: "gauss_newton" or "hessian".
    """

    network: Network
    curvature: str

    @property
    def key(self) -> dict[str, Any]:
        """What they depend on."""
        settings = self.network.settings
        sizes = {"num_points": settings.num_points, "num_test": settings.num_test}
        return self.network.key | sizes | {"curvature": self.curvature, "damping": self.damping}

    @property
    def described(self) -> str:
        """For the terminal."""
        return f"{self.network.label}, {self.curvature}, seed {self.network.seed}"

    @cached_property
    def matrix(self) -> GaussNewtonOperator | HessianOperator:
        """A, without damping."""
        return MATRICES[self.curvature](self.network.model, self.network.loss, self.network.train)

    @property
    def damped(self) -> LinearOperator:
        """A + damping I."""
        return self.matrix + self.damping * identity

    @cached_property
    def damping(self) -> float:
        """The config's with the L2 of training, or for an indefinite Hessian what makes it definite."""
        settings = self.network.settings
        added = float(settings.damping + settings.training.weight_decay)
        smallest = self.spectrum["smallest"]
        return added if smallest + added > 0 else -HESSIAN_MARGIN * smallest

    @cached_property
    def spectrum(self) -> dict[str, float]:
        """The largest eigenvalue of A, and the smallest: measured of the Hessian, 0 of G (to Lanczos' 1 %)."""
        key = self.network.key | {"curvature": self.curvature}
        about = f"spectrum of {self.described}"
        return self.network.run.unit("pbrf/appg_spectrum", key, self._spectrum, version=1, about=about)

    @cached_property
    def right_hand_sides(self) -> Tensor:
        """B, (P, K)."""
        network = self.network
        generator = network.run.generator("pbrf points", network.settings.seed_name, network.seed)
        points = torch.randperm(len(network.train[1]), generator=generator)[: network.settings.num_points]
        chosen = (network.train[0][points], network.train[1][points])
        return per_example_gradients(network.model, network.loss, chosen).T.contiguous()

    @cached_property
    def test_gradients(self) -> Tensor:
        """(M, P): minus their products with a solution are influence scores."""
        return per_example_gradients(self.network.model, self.network.loss, self.network.test)

    @cached_property
    def reference(self) -> dict[str, Any]:
        """`solutions` (P, K) in double precision, and their largest relative `residual`."""
        solver = dict(self.network.settings.reference[self.curvature])
        about = f"exact solutions {self.described}"
        compute = partial(self._reference, solver)
        key = self.key | {"solver": solver}
        return self.network.run.unit("pbrf/appg_reference", key, compute, version=1, about=about)

    def in_double_precision(self) -> Systems:
        """Return the same systems for a copy of the network in fp64."""
        network = self.network
        double = copy.deepcopy(network.model).double()
        changed = replace(network, model=double, train=_double(*network.train), test=_double(*network.test))
        return Systems(changed, self.curvature)

    def _spectrum(self) -> dict[str, float]:
        run = self.network.run
        generator = run.generator("pbrf appg spectrum", self.network.settings.seed_name, self.network.seed)
        largest = top_eigenvalues(self.matrix, 1, rtol=0.01, generator=generator)
        run.add_matvecs(largest.num_matvecs)
        if self.curvature == "gauss_newton":
            return {"largest": float(largest.values[0]), "smallest": 0.0}
        negative = top_eigenvalues(-self.matrix, 1, rtol=0.01, generator=generator)
        run.add_matvecs(negative.num_matvecs)
        return {"largest": float(largest.values[0]), "smallest": -float(negative.values[0])}

    def _reference(self, solver: dict[str, Any]) -> dict[str, Any]:
        exact = self.in_double_precision()
        run = self.network.run
        generator = run.generator("pbrf appg reference", self.network.settings.seed_name, self.network.seed)
        damped = exact.matrix + self.damping * identity
        solution = instantiate(solver).solve(damped, exact.right_hand_sides, generator=generator)
        run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.cpu(), "residual": float(solution.residual.max())}


def _double(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return them in fp64, labels as they are."""
    return inputs.double(), targets.double() if targets.is_floating_point() else targets
