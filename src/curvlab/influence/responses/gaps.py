"""How far two responses are apart: between their networks' outputs over the training set."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.linalg import unflatten
from curvlab.problem import Batches, Data, ModelFunction

# Which two responses each gap lies between (Bae et al. 2022, Sec. C.2), in the order of Table 5 and Fig. 4.
GAPS = {
    "warm_start": ("cold", "warm"),
    "proximity": ("warm", "proximal"),
    "non_convergence": ("proximal", "proximal_bregman"),
    "linearisation": ("proximal_bregman", "linearised"),
    "solver": ("linearised", "influence"),
}


@dataclass(frozen=True)
class Gap:
    """The distance of two sets of K networks, group by group.

    The paper calls it the L2 distance between the outputs and does not say whether it is divided by √N.

    Attributes:
        per_example: (K,), ‖Y_a - Y_b‖_F / √N, Y: (N, outputs) before the loss (logits, predictions).
        total: (K,), ‖Y_a - Y_b‖_F.
    """

    per_example: Tensor
    total: Tensor


def output_gaps(
    model: nn.Module, data: Data, responses: dict[str, Tensor], *, batch_size: int = 512
) -> dict[str, Gap]:
    """Return the gap between each response and the next, named "a-b", in float64.

    Args:
        model: at θ^s, in eval mode.
        data: the training set, or a part of it; targets are not used.
        responses: displacements (K, P) from θ^s by name, in order.
        batch_size: examples at a time.

    Cost: one forward pass over the data for each response and group.
    """
    function = ModelFunction(copy.deepcopy(model).double())
    parameters, sizes = function.parameters, {len(found) for found in responses.values()}
    if len(responses) < 2 or len(sizes) != 1:
        raise ValueError(f"need two or more responses of one number of groups, got {len(responses)} of {sizes}")
    (num_groups,), count = sizes, 0
    squares = {pair: torch.zeros(num_groups, dtype=torch.float64) for pair in pairwise(responses)}
    batches = Batches.of(function, data, batch_size=batch_size)
    with torch.no_grad():
        for inputs, targets in batches:
            count += len(targets)
            for k in range(num_groups):
                outputs = {
                    name: function(
                        [
                            value + step
                            for value, step in zip(
                                parameters, unflatten(found[k].double(), parameters), strict=True
                            )
                        ],
                        inputs,
                    )
                    for name, found in responses.items()
                }
                for (first, second), total in squares.items():
                    total[k] += (outputs[first] - outputs[second]).square().sum().cpu()
    return {
        f"{first}-{second}": Gap((total / count).sqrt(), total.sqrt())
        for (first, second), total in squares.items()
    }
