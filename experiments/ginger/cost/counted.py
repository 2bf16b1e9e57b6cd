"""Counted operations of a step on the paper's networks, without running them: what Table 1's column would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.lab.models import resnet18, resnet50
from experiments.ginger.cost.optimizers import STEPS, own_cost
from experiments.ginger.printed import table_1

NETWORKS = {"ResNet-18": resnet18, "ResNet-50": resnet50}
SIZES = (20_000, 40_000)  # two points on a line


def gradient_flops(network: str, batch_size: int) -> dict[str, int]:
    """Return counts for one batch of CIFAR-100: forward, backward, num_parameters; and entries of convolutions.

    `activations`: numbers that the convolutions give, one pass. Nothing is computed: the tensors have shapes only.
    """
    with torch.device("meta"):
        model = NETWORKS[network]((3, 32, 32), 100, stem="cifar").train()
        inputs, targets = torch.zeros(batch_size, 3, 32, 32), torch.zeros(batch_size, dtype=torch.long)
    entries = []

    def see(module: nn.Module, given: Any, output: Tensor) -> None:
        entries.append(output.numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(see)
    with FlopCounterMode(display=False) as forward:
        loss = nn.functional.cross_entropy(model(inputs), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return {
        "forward": forward.get_total_flops(),
        "backward": backward.get_total_flops(),
        "activations": sum(entries),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def own_flops(kind: str, rank: int) -> tuple[float, float]:
    """Return a and b: update and step of an optimizer have a + bP operations, on average."""
    small, large = (
        cost.flops / calls for cost, calls in (own_cost(kind, n, rank=rank, num_repeats=1) for n in SIZES)
    )
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return small - slope * SIZES[0], slope


def counted_steps(batch_size: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each network, optimizer, rank and way of the forward pass: operations of a whole step.

    Columns: network, optimizer, rank, forward ("shared" by both gradients, or the sampled labels' "own"; empty for
    first-order methods), batch_size, num_parameters, forward_flops, backward_flops, activations, own_flops (of
    update and step), flops (of all), to_adam.
    """
    own = {(kind, rank): own_flops(kind, rank) for kind in ("QNG", "Ginger") for rank in ranks}
    rows: list[dict[str, Any]] = []
    for network in NETWORKS:
        gradient = gradient_flops(network, batch_size)
        shape = {"network": network, "batch_size": batch_size, "num_parameters": gradient["num_parameters"]}
        shape |= {"activations": gradient["activations"]}
        passes = {"forward_flops": gradient["forward"], "backward_flops": gradient["backward"]}
        once = gradient["forward"] + gradient["backward"]
        for kind in ("momentum", "Adam"):
            rows.append(shape | {"optimizer": kind, "own_flops": 0.0, "flops": once, "to_adam": 1.0} | passes)
        for (kind, rank), (constant, slope) in own.items():
            for way in STEPS:
                at = shape | {"optimizer": kind, "rank": rank, "forward": way}
                of_own = constant + slope * gradient["num_parameters"]
                total = once + gradient["backward"] + (gradient["forward"] if way == "own" else 0) + of_own
                rows.append(at | passes | {"own_flops": of_own, "flops": total, "to_adam": total / once})
    return rows


def beside_the_paper(table: pd.DataFrame) -> pd.DataFrame:
    """Return `counted_steps` with Table 1's paper_flops, paper_memory (GB), and paper_to_adam, of FLOPs."""
    printed = table_1().rename(columns={"model": "network", "flops": "paper_flops", "memory": "paper_memory"})
    names = {kind.lower(): kind for kind in table.optimizer.unique()}
    printed = printed.assign(optimizer=printed.racer.map(names))
    columns = ["network", "optimizer", "rank"]
    found = table.merge(printed[[*columns, "paper_flops", "paper_memory"]], on=columns, how="left")
    adam = found[found.optimizer == "Adam"].set_index("network").paper_flops
    return found.assign(paper_to_adam=found.paper_flops / found.network.map(adam))
