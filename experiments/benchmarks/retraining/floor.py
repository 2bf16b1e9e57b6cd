"""What a step costs at least: its matrix products alone, and the update of the parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from experiments.benchmarks.retraining.network import Network


def floor_seconds(
    network: Network, num_copies: int, *, clock: Callable[[], float], num_steps: int
) -> dict[str, float]:
    """Return seconds of one copy's share of a step: products in a loop, batched products, the update.

    The update is SGD with momentum, of as many parameters as all copies have.
    """
    products = _Products(network, num_copies)
    like = products.inputs
    moved = torch.zeros(num_copies, network.num_parameters, dtype=like.dtype, device=like.device)
    moved.grad = torch.zeros_like(moved)
    stepper = torch.optim.SGD([moved], lr=0.1, momentum=network.hyper.get("momentum", 0.0))
    found = {}
    works = {"products": products.in_a_loop, "batched_products": products.batched, "update": stepper.step}
    for name, work in works.items():
        work()
        start = clock()
        for _ in range(num_steps):
            work()
        found[name] = (clock() - start) / num_steps / num_copies
    return found


class _Products:
    """Those of a step of K copies, one layer and batch (B, I) x (I, O) after the other.

    Outputs, weight gradient, and, but for the first layer, input gradient; (K, B, I) x (K, I, O) for all copies.
    The first layer's inputs are shared by all of them, as in `train_ensemble`.
    """

    def __init__(self, network: Network, num_copies: int) -> None:
        linear = [module for module in network.initial.modules() if isinstance(module, nn.Linear)]
        sizes = [linear[0].in_features, *(layer.out_features for layer in linear)]
        like, batch = linear[0].weight, len(network.batches[0])
        generator = torch.Generator(like.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

        self.inputs = draw(batch, sizes[0])
        self.values = [draw(num_copies, batch, size) for size in sizes[1:]]
        self.weights = [draw(num_copies, a, b) for a, b in pairwise(sizes)]

    def in_a_loop(self) -> None:
        """Copy by copy."""
        for k in range(len(self.weights[0])):
            self._of([value[k] for value in self.values], [weight[k] for weight in self.weights])

    def batched(self) -> None:
        """All copies in one product."""
        self._of(self.values, self.weights)

    def _of(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        for index, (before, weight, after) in enumerate(
            zip((self.inputs, *values), weights, values, strict=False)
        ):
            before @ weight
            before.mT @ after
            if index > 0:
                after @ weight.mT
