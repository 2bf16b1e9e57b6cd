"""Units of work beyond those of the tables: groups of points, divergence as a result, the whole misalignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.described import fingerprint
from curvlab.influence.retraining import LeftOut, cold_optimum, output_gaps
from curvlab.solvers import DivergenceError
from curvlab.training import TrainingDivergedError
from experiments.pbrf.decomposition import RETRAINED, Decomposition
from experiments.pbrf.networks import NOTHING


@dataclass(frozen=True)
class LevelDecomposition(Decomposition):
    """The decomposition at one level of a factor; single points share their units with the tables.

    A response that diverges is nan from then on, instead of ending the run.

    Attributes:
        fraction: of the training set that each of the `num_points` groups holds; None: single points.
        shared_damping: of the task; the cold and the warm optimum do not depend on the damping, and are those of
            this one at every level.
    """

    fraction: float | None
    shared_damping: float

    @cached_property
    def groups(self) -> list[Tensor]:
        """The K groups that are left out, one at a time: random, smaller ones inside larger ones."""
        if self.fraction is None:
            return list(self.points[:, None])
        network = self.network
        size = len(network.train[1])
        generator = network.run.generator("pbrf groups", network.settings.seed_name, network.seed)
        taken = max(1, round(self.fraction * size))
        return [torch.randperm(size, generator=generator)[:taken] for _ in range(self.num_points)]

    @cached_property
    def left_out(self) -> LeftOut:
        """Each group left out by itself."""
        return self.network.left_out(self.groups)

    @property
    def key(self) -> dict[str, Any]:
        """What responses depend on."""
        key = super().key
        return key if self.fraction is None else key | {"groups": fingerprint(self.groups)}

    def response(self, name: str) -> Tensor:
        """Return displacements from θ^s, (K, P), by the names of `Decomposition.response`."""
        settings = self.network.settings
        if name in ("cold", "warm") and settings.damping != self.shared_damping:
            shared = settings.copy()
            shared.damping = self.shared_damping
            return replace(self, network=replace(self.network, settings=shared)).response(name)
        return super().response(name)

    def whole(self, curvature: str) -> Tensor:
        """Return the distance between the cold optimum and the influence estimate, (K, 2), as a gap."""
        found = {"cold": self.response("cold"), "influence": self.influence(curvature)[0]}

        def compute() -> dict[str, Any]:
            gap = output_gaps(self.network.model, self._gap_data(), found)["cold-influence"]
            return {"whole": torch.stack([gap.per_example, gap.total], dim=1)}

        key = self._influence_key(curvature) | {"gap_examples": self.network.settings.gap_examples}
        return self.network.run.unit("pbrf/whole_gap", key, compute, version=1)["whole"]

    def _respond(self, name: str, unfinished: Path) -> dict[str, Any]:
        network, minimizer = self.network, self.network.minimizer(name, unfinished)
        groups = [*self.groups, NOTHING] if name == "warm" else self.groups  # as in the tables
        left_out = network.left_out(groups)
        try:
            if name == "cold":
                moved = cold_optimum(left_out, minimizer, initial=network.initial)
            else:
                moved = RETRAINED[name](left_out, minimizer)
        except TrainingDivergedError:
            moved = torch.full((len(groups), len(network.initial)), torch.nan)
        return {"displacement": moved.cpu()}

    def _influence(self, curvature: str) -> dict[str, Any]:
        try:
            return super()._influence(curvature)
        except DivergenceError:  # LiSSA's, at the largest of its scalings
            nothing = torch.full((self.num_points, len(self.network.initial)), torch.nan)
            return {"displacement": nothing, "residual": torch.nan}
