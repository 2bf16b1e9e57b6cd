"""The systems of one task: operator, right-hand sides, exact solutions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import per_example_gradients
from curvlab.lab import runs
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import top_eigenvalues
from experiments.shared.task import TrainedTask


@dataclass(frozen=True)
class Systems:
    """(G + damping I) X = B for gradients B of some test losses.

    Attributes:
        run: store, seeds, progress.
        task: model and data.
        settings: of the task.
    """

    run: runs.Run
    task: TrainedTask
    settings: DictConfig

    @property
    def key(self) -> dict[str, Any]:
        """What the answers depend on."""
        return self.task.key | {"num_rhs": self.settings.num_rhs, "damping": self.damping}

    @cached_property
    def operator(self) -> GaussNewtonOperator:
        """G."""
        return GaussNewtonOperator(self.task.model, self.task.loss, self.task.train)

    @cached_property
    def spectrum(self) -> dict[str, Any]:
        """λmax and its eigenvector (P,); a unit."""
        about = f"largest eigenvalue of {self.task.label}"
        return self.run.unit("preconditioners/largest", self.task.key, self._spectrum, version=1, about=about)

    @property
    def damping(self) -> float:
        """As the settings say, or by their share of λmax."""
        given, ratio = self.settings.damping, self.settings.damping_ratio
        return float(given) if given is not None else float(ratio * self.spectrum["value"])

    @property
    def damped(self) -> LinearOperator:
        """G + damping I."""
        return self.operator + self.damping * identity

    @cached_property
    def right_hand_sides(self) -> Tensor:
        """B, (P, K)."""
        splits = self.task.splits
        generator = self.run.generator("preconditioners", splits.name)
        chosen = torch.randperm(len(splits.test), generator=generator)[: self.settings.num_rhs]  # type: ignore[arg-type]
        return per_example_gradients(self.task.model, self.task.loss, stack(splits.test, chosen)).T.contiguous()

    @property
    def lissa_damping(self) -> float:
        """That of LiSSA's systems, a multiple of the other."""
        return float(self.settings.lissa_damping_factor) * self.damping

    def solutions(self) -> Tensor:
        """Return the exact answers of LiSSA's systems, (P, K), by block CG in double precision."""
        unit = self.key | {"num": self.settings.num_lissa, "rtol": self.settings.reference_rtol}
        unit["damping"] = self.lissa_damping
        about = f"exact solutions {self.task.label}"
        compute = partial(self._solutions, self.settings.num_lissa)
        return self.run.unit("preconditioners/exact", unit, compute, version=1, about=about)["solutions"]

    def _spectrum(self) -> dict[str, Any]:
        generator = self.run.generator("largest", self.task.seed_name)
        found = top_eigenvalues(self.operator, 1, rtol=0.01, generator=generator)
        return {"value": float(found.values[0]), "vector": found.vectors[:, 0]}

    def _solutions(self, num: int) -> dict[str, Any]:
        model = copy.deepcopy(self.task.model).double()
        exact = GaussNewtonOperator(model, self.task.loss, self.task.train) + self.lissa_damping * identity
        solver = BlockConjugateGradient(self.settings.reference_rtol)
        solution = solver.solve(exact, self.right_hand_sides[:, :num].double())
        self.run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.float()}
