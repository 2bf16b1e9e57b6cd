"""Influence by a direct solve in double precision, whatever precision the network was trained in."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from curvlab.influence.retraining import LeftOut, influence_estimate
from experiments.pbrf.bunch_kaufman import BunchKaufman
from experiments.pbrf.decomposition import Decomposition


@dataclass(frozen=True)
class ExactDecomposition(Decomposition):
    """The decomposition with influence by `BunchKaufman`, where that is its solver, in double precision.

    H + λI at a network that has not converged has eigenvalues on both sides of zero and next to it. In single
    precision its rounding is larger than those; and a Krylov method that stops at a residual of a few percent has
    left their directions out, so that what it returns is near the Gauss-Newton matrix's estimate and not H's.
    Everything else is `Decomposition`'s, and so are its units of work.
    """

    def with_solver(self, curvature: str, solver: DictConfig) -> ExactDecomposition:
        """Return the same network and points with another solver of influence."""
        settings = self.network.settings.copy()
        settings.influence[curvature] = solver
        return replace(self, network=replace(self.network, settings=settings))

    def hessian_spectrum(self) -> dict[str, float]:
        """Return `Decomposition.hessian_spectrum`'s, with `num_below` from the factors of H + λI."""
        found = super().hessian_spectrum()
        if self._solves_exactly("hessian"):
            self.influence("hessian")
            key = self._influence_key("hessian")
            stored = self.network.run.unit("pbrf/influence", key, self._refuse, version=1)
            found["num_below"] = float(stored["num_negative"])
        return found

    def _influence(self, curvature: str) -> dict[str, Any]:
        if not self._solves_exactly(curvature):
            return super()._influence(curvature)
        solver = instantiate(self.network.settings.influence[curvature])
        found, solution = influence_estimate(self._in_double(), solver, curvature=curvature)  # type: ignore[arg-type]
        self.network.run.add_matvecs(solution.num_matvecs)
        residual = float(solution.residual.max())
        return {"displacement": found.cpu(), "residual": residual, "num_negative": solution.num_negative}  # type: ignore[attr-defined]

    def _solves_exactly(self, curvature: str) -> bool:
        return isinstance(instantiate(self.network.settings.influence[curvature]), BunchKaufman)

    def _in_double(self) -> LeftOut:
        """Return the points left out of a network and data in double precision."""
        network = self.network
        inputs, targets = (t.to(torch.float64) if t.is_floating_point() else t for t in network.train)
        model = copy.deepcopy(network.model).to(torch.float64)
        return replace(network, model=model, train=(inputs, targets)).left_out(list(self.points[:, None]))

    def _refuse(self) -> dict[str, Any]:
        raise RuntimeError("influence is computed before it is asked for its inertia")  # the unit exists by then
