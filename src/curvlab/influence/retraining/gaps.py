"""How far two responses are apart: between their networks' outputs over the training set."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.influence.retraining.responses import outputs_of_copies
from curvlab.linalg import flatten
from curvlab.problem import Data, Problem
from curvlab.problem.batch import Inputs
from curvlab.progress import can_be_silent
from curvlab.shown import Shown, Summary

# Which two responses each gap lies between (Bae et al. 2022, Sec. C.2), in the order of Table 5 and Fig. 4.
GAPS = {
    "warm_start": ("cold", "warm"),
    "proximity": ("warm", "proximal"),
    "non_convergence": ("proximal", "proximal_bregman"),
    "linearisation": ("proximal_bregman", "linearised"),
    "solver": ("linearised", "influence"),
}

LABELS = {
    "warm_start": "warm-start gap",
    "proximity": "proximity gap",
    "non_convergence": "non-convergence gap",
    "linearisation": "linearisation error",
    "solver": "solver error",
}


@dataclass(frozen=True, repr=False)
class Gap(Shown):
    """The distance of two sets of K networks, group by group.

    The paper calls it the L2 distance between the outputs and does not say whether it is divided by √N.

    Attributes:
        per_example: (K,), ‖Y_a - Y_b‖_F / √N, Y: (N, outputs) before the loss (logits, predictions).
        total: (K,), ‖Y_a - Y_b‖_F.
    """

    per_example: Tensor
    total: Tensor

    def summary(self) -> Summary:
        """Return its mean over groups."""
        return Summary("gap", f"{float(self.per_example.mean()):.3g}", f"mean over {len(self.total):,} groups")


@can_be_silent
def output_gaps(
    model: nn.Module | Problem,
    data: Data | None = None,
    responses: dict[str, Tensor] | None = None,
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> dict[str, Gap]:
    """Return the gap between each response and the next, named "a-b", in float64.

    Args:
        model: at θ^s, in eval mode; or a `Problem` in the place of model and data.
        data: the training set, or a part of it; targets are not used.
        responses: displacements (K, P) from θ^s by name, in order.
        batch_size: examples at a time.
        progress: show a bar.

    Cost: one forward pass over the data for each response and group.
    """
    responses = responses or {}
    sizes = {len(found) for found in responses.values()}
    if len(responses) < 2 or len(sizes) != 1:
        raise ValueError(f"need two or more responses of one number of groups, got {len(responses)} of {sizes}")
    loss = None if isinstance(model, Problem) else nn.MSELoss()
    problem = Problem.of(model, loss, data, batch_size=batch_size).copied(torch.float64)
    start = flatten(problem.parameters)[:, None]

    def squares(inputs: Inputs, _: Tensor, __: Tensor | None) -> Tensor:
        outputs = (
            outputs_of_copies(problem.function, start + found.double().T, inputs) for found in responses.values()
        )
        return torch.stack([(a - b).square().flatten(1).sum(1).cpu() for a, b in pairwise(outputs)])

    totals = torch.stack(list(problem.map(squares, name="distances"))).sum(0)
    return {
        f"{first}-{second}": Gap((total / problem.num_examples).sqrt(), total.sqrt())
        for (first, second), total in zip(pairwise(responses), totals, strict=True)
    }
