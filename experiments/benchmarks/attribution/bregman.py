"""The proximal Bregman response (PBRF): of every training example, as a score, and of whole subsets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from curvlab.influence import loss_response, subset_weights
from curvlab.influence.retraining import MAX_WHOLE_GROUP, LeftOut, ProximalBregmanCost, curvature_operator
from curvlab.linalg import LinearOperator
from curvlab.solvers import Nystrom
from experiments.benchmarks.attribution.network import Network, Trained
from experiments.benchmarks.gauges import work_clock


class SubsetsAlone(LeftOut):
    """The cost is the mean over what is not left out, as in the retrainings: w_ki = N / size there, else 0."""

    @cached_property
    def weights(self) -> Tensor:
        """w, (K, N)."""
        kept = torch.ones(len(self.groups), self.num_examples, dtype=torch.bool)
        for row, group in zip(kept, self.groups, strict=True):
            row[group] = False
        return subset_weights(kept).to(self.base)


class ProximalBregmanResponses:
    """Responses of one trained network, by Newton's method with one matrix for all of them.

    The objective is Eq. 8 of Bae et al. (2022), `ProximalBregmanCost`. Each starts at the trained network with the
    influence estimate as its first step; what a step leaves of the gradient is how far they are apart.

    Args:
        network: data and settings, see `responses` in conf/benchmarks/attribution/target.yaml.
        trained: θ^s.
        damping: λ of the proximity term.
    """

    def __init__(self, network: Network, trained: Trained, damping: float) -> None:
        self.network, self.model, self.damping = network, trained.model, damping
        self.settings = network.settings.responses
        self._of: dict[str, float] = {"damping": damping, "l2": trained.length.weight_decay}

    def scores(self) -> dict[str, Any]:
        """Return (M, N) scores, -N times the change of a test loss when an example is left out, and their quality.

        Quality: the gradient norm of the objective over that at θ^s, median and 90 % quantile over examples. The
        response of an example whose objective has no minimum nearby stays where its gradient was smallest.
        """
        num_train = self.network.num_train
        parts = [
            self._part(f"examples {int(some[0])} and on", list(some[:, None]), LeftOut)
            for some in torch.arange(num_train).split(self.settings.at_once)
        ]
        return self._gathered(parts) | {"scores": -num_train * torch.cat([p["changes"] for p in parts], dim=1)}

    def of_subsets(self, subsets: Tensor) -> dict[str, Any]:
        """Return the change of test losses when all but a subset is left out at once, (S, N) -> (S, M)."""
        left_out = [row.logical_not().nonzero().flatten() for row in subsets]
        if min(map(len, left_out)) <= MAX_WHOLE_GROUP:
            raise ValueError(
                f"subsets must leave out more than {MAX_WHOLE_GROUP} examples: of smaller groups "
                "ProximalBregmanCost takes the members, not their weights"
            )
        at_once = self.settings.at_once
        parts = [
            self._part(f"subsets {start} and on", left_out[start : start + at_once], SubsetsAlone)
            for start in range(0, len(left_out), at_once)
        ]
        return self._gathered(parts) | {"predicted": torch.cat([part["changes"] for part in parts], dim=1).T}

    def _part(self, name: str, groups: list[Tensor], kind: type[LeftOut]) -> dict[str, Any]:
        # The groups follow from what identifies the network and from the part's name.
        key = self.network.key | {
            "num_queries": self.network.settings.num_queries,
            "num_subsets": self.network.settings.num_subsets,
            "damping": self.damping,
            "part": name,
            "responses": dict(self.settings),
        }
        about = f"PBRF of {self.network.label}, {name}"
        steps = self.settings.num_steps if kind is LeftOut else self.settings.num_steps_of_subsets
        compute = partial(self._responses, groups, kind, steps)
        return self.network.run.unit("attribution/pbrf", key, compute, version=1, about=about)

    def _responses(self, groups: list[Tensor], kind: type[LeftOut], num_steps: int) -> dict[str, Any]:
        clock, network = work_clock(self.network.run.device), self.network
        start = clock()
        left_out = kind(self.model, network.loss, network.train, groups, **self._of)
        objective = ProximalBregmanCost(left_out)
        displacement, norms = near_minimum(
            partial(objective, indices=torch.arange(network.num_train, device=left_out.base.device)),
            torch.zeros(len(groups), len(left_out.base)).to(left_out.base),
            inverse=self._inverse,
            num_steps=num_steps,
        )
        # In float64: a test loss changes in its last digits.
        columns = displacement.T.double().contiguous()
        changes = loss_response(self.model, network.loss, network.test, columns, epsilon=1.0)
        return {"changes": changes.cpu(), "gradient_norm": norms.cpu(), "seconds": clock() - start}

    @cached_property
    def _inverse(self) -> LinearOperator:
        """Approximates (G + (λ + l2) I)⁻¹ at θ^s."""
        nobody = LeftOut(self.model, self.network.loss, self.network.train, [], **self._of)
        generator = self.network.run.generator("PBRF", self.network.settings.seed_name)
        operator = curvature_operator(nobody, "gauss_newton")
        return Nystrom(self.settings.rank).build(operator, generator=generator)[0]

    def _gathered(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        norms = torch.cat([part["gradient_norm"] for part in parts]).double()
        return {
            "status": "done",
            "cpu_seconds": sum(part["seconds"] for part in parts),
            "gradient_norm": float(norms.quantile(0.5)),
            "gradient_norm_90": float(norms.quantile(0.9)),
        }


def near_minimum(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, *, inverse: LinearOperator, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return u <- u - t M ∇Q(u) after some steps, (K, P), and ‖∇Q‖ over that at the start, (K,).

    A step that does not bring a copy's gradient down is not taken, and its next one is a quarter as long: of an
    objective without a minimum nearby the copy stays where it was.

    Args:
        objective: (K, P) -> K values and their gradients (K, P).
        start: (K, P).
        inverse: M, (P, P), shared by all copies.
        num_steps: each a gradient of every copy.
    """
    found, gradient = start.clone(), objective(start)[1]
    first = norms = gradient.norm(dim=1)
    lengths = torch.ones_like(norms)
    for _ in range(num_steps):
        moved = found - lengths[:, None] * (inverse @ gradient.T.contiguous()).T
        at_moved = objective(moved)[1]
        at_norms = at_moved.norm(dim=1)
        better = at_norms < norms  # never so where it is not finite
        found = torch.where(better[:, None], moved, found)
        gradient = torch.where(better[:, None], at_moved, gradient)
        norms = torch.where(better, at_norms, norms)
        lengths = torch.where(better, (2 * lengths).clamp(max=1.0), lengths / 4)
    return found, norms / first.clamp(min=torch.finfo(first.dtype).tiny)
