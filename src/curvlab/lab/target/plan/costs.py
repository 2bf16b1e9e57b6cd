"""Seconds of one example's share of a Gauss-Newton product, and of random numbers, here, by a short probe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.target.plan.sizes import Sizes, example

# A probe takes about this much arithmetic, and a network that needs more for one example is not built.
PROBE_FLOPS = 3e9
MOST_FLOPS, MOST_PARAMETERS, MOST_EXAMPLES = 2e10, 2e7, 256
FORWARDS_OF_A_PRODUCT, FORWARDS_OF_A_GRADIENT = 5, 3
_WIDTH, _DEPTH, _ROWS = 1024, 3, 256  # of the probe for larger networks
_NORMALS = 2**24  # of the probe for random numbers: more than a cache holds, as for large networks


@dataclass(frozen=True)
class Cost:
    """What one example takes in one product.

    Attributes:
        seconds: CPU seconds of one thread.
        source: where they come from, for the reader.
    """

    seconds: float
    source: str


def cost_of(sizes: Sizes) -> Cost:
    """Return the cost: of the task's own network with random weights where a probe of a second can have it.

    Else its arithmetic, five forwards, at the rate of a product with wide linear layers: what kernels reach at
    best, so that a real run takes longer.
    """
    work = FORWARDS_OF_A_PRODUCT * sizes.flops
    if work > MOST_FLOPS or sizes.total_parameters > MOST_PARAMETERS:
        return Cost(work / rate(), f"arithmetic at {rate():.2g} FLOP/s of wide layers")
    count = int(max(1, min(PROBE_FLOPS / max(work, 1), MOST_EXAMPLES, sizes.num_examples or MOST_EXAMPLES)))
    inputs, targets = example(sizes.input_shape, sizes.num_outputs, count, sizes.dtype, sizes.is_language)
    seconds = _seconds(sizes.build(), inputs, targets)
    return Cost(seconds / count, f"own network, {count} examples")


@cache
def rate() -> float:
    """Return FLOP/s of products with wide linear layers in fp32, one thread."""
    layers: list[nn.Module] = []
    for _ in range(_DEPTH):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers)
    seconds = _seconds(model, torch.randn(_ROWS, _WIDTH), torch.randint(_WIDTH, (_ROWS,)))
    return FORWARDS_OF_A_PRODUCT * 2 * _WIDTH**2 * _DEPTH * _ROWS / seconds


@cache
def normals_per_second() -> float:
    """Return how many fp32 normals one thread draws in a CPU second, as `LinearOperator.randn` does."""
    generator = torch.Generator().manual_seed(0)

    def seconds() -> float:
        start = time.process_time()
        torch.randn(_NORMALS, generator=generator)
        return time.process_time() - start

    return _NORMALS / min(seconds() for _ in range(3))


def _seconds(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    op = GaussNewtonOperator(model.eval(), nn.CrossEntropyLoss(), (inputs, targets), batch_size=len(targets))
    return min(seconds_of(op) for _ in range(3))  # the first loads what is loaded lazily


def seconds_of(op: GaussNewtonOperator) -> float:
    """Return CPU seconds of one product."""
    vector = op.randn(1, torch.Generator().manual_seed(0))[:, 0]
    start = time.process_time()
    op.matvec(vector)
    return time.process_time() - start
