"""Training batches with their examples' weights, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from curvlab.problem import Batches, OutputLoss
from curvlab.problem.batch import Batch
from curvlab.problem.memory import Memory
from curvlab.problem.weighted_loss import WeightedLoss

# A batch and its examples' weights; None: all count alike.
WeightedBatch = tuple[Batch, Tensor | None]


def weighted_batches(train: Batches, weights: Tensor | None) -> Iterator[WeightedBatch]:
    """Yield the batches of all training examples, whose weights are (N,)."""
    start = 0
    for batch in train:
        stop = start + len(batch[1])
        yield batch, None if weights is None else weights[start:stop]
        start = stop


def drawn_batches(train: Batches, drawn: Tensor, factors: Tensor | None) -> Iterator[WeightedBatch]:
    """Yield batches of the examples `drawn`, (B,), whose weights are `factors`, (B,)."""
    if factors is None:
        yield from ((batch, None) for batch in train.select(drawn))
        return
    for batch, places in train.select_with_places(drawn.cpu()):
        yield batch, factors[places.to(factors.device)].to(train.device, train.dtype)


def pieces(batches: Iterable[WeightedBatch], size: Memory, loss: OutputLoss) -> Iterator[tuple[Batch, OutputLoss]]:
    """Yield the batches in pieces of so many examples, each with the loss in which they have their weights."""
    for whole, weights in batches:
        start = 0
        for batch in size.pieces(whole):
            stop = start + len(batch[1])
            yield batch, loss if weights is None else WeightedLoss(loss, weights[start:stop])
            start = stop
