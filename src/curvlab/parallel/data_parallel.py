"""A mean over examples that are spread over processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from curvlab.curvature import DataOperator
from curvlab.curvature.examples import quadratic_forms
from curvlab.curvature.layers import Layer
from curvlab.curvature.operator import MeanOverRanks
from curvlab.influence.derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import LinearOperator
from curvlab.parallel.examples_over_ranks import ExamplesOverRanks
from curvlab.problem import Data
from curvlab.ranks import SAME_SEEDS, Ranks
from curvlab.seeding import Seed


class DataParallelOperator(MeanOverRanks):
    """The curvature matrix of all ranks' examples together: A = 1/n sum_r n_r A_r, n = sum_r n_r.

    A_r is the matrix of rank r's examples and n_r what its mean divides by (predictions, not ranks or batches), so
    that shares of any sizes give the matrix of the whole data; with reduction="sum" A = sum_r A_r. Every rank
    holds the whole model and whole vectors, the same bits on each, and all solvers, preconditioners, spectra and
    estimators of curvlab run on it unchanged, in step: all ranks make the same calls with generators seeded alike.

    Args:
        share: a GaussNewtonOperator, HessianOperator or FisherOperator of this rank's own examples. With
            kind="monte_carlo" seed its generator by the rank, too: labels drawn alike would not be independent.
        ranks: the process group's by default; one process alone needs none.

    Cost of a product: that of the share's, and one all-reduce of P numbers for each vector.

    Raises:
        ValueError: on every rank, where the models differ.
    """

    def __init__(self, share: DataOperator, ranks: Ranks | None = None) -> None:
        super().__init__(share.shape[0], dtype=share.dtype, device=share.device)
        self.share = share
        self.ranks = Ranks.current() if ranks is None else ranks
        self._examples = ExamplesOverRanks(self.ranks, share.problem)
        self._part: LinearOperator | None = None
        self._sampled = False
        self.ranks.agree(
            torch.tensor(share.shape[0]),
            "the number of trainable parameters: build the same model on every rank, frozen alike",
        )
        self.ranks.agree(
            torch.stack([value.double().square().sum() for value in share.function.parameters]),
            "the values of the model's parameters: load the same weights, or seed alike, on every rank",
        )

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P, K) -> (P, K), the same on every rank."""
        part = self._own_part
        return self.ranks.sum(torch.zeros_like(vectors) if part is None else part.matmat(vectors))

    def quadratic_forms(self, vectors: Tensor) -> Tensor:
        """Return vᵀA v for each column, (P, K) -> (K,), by forward passes alone; of Gauss-Newton matrices."""
        part = self._own_part
        none = torch.zeros(vectors.shape[1], dtype=torch.float64, device=vectors.device)
        return self.ranks.sum(none if part is None else quadratic_forms(part, vectors))

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> DataParallelOperator:
        """Return the operator on `batch_size` of all ranks' examples, drawn with replacement; unbiased.

        Uniformly, or with `probabilities`, (N,), of all ranks' examples, the same on every rank.

        Examples are numbered through the shares in the order of the ranks, so that the same seed draws the batch
        that one process draws from the whole data, for any number of ranks.
        """
        mine, factors, divisor = self._examples.draw(batch_size, generator, probabilities)
        sampled = copy.copy(self)
        sampled._sampled = True
        sampled._part = None
        if len(mine):
            sampled._part = self.share.part(mine, weights=factors, divisor=divisor)
        return sampled

    def weighted(self, weights: Tensor) -> DataParallelOperator:
        """Return 1/n Σ_i w_i A_i over all ranks' examples (DataOperator.weighted), by this rank's own `weights`.

        All ranks call it. Traces, rows and random batches are those of the operator without weights alone.
        """
        divisor, weighted = self.divisor, copy.copy(self)
        part = self._examples.refused_together(lambda: self.share.weighted(weights).part(divisor=divisor))
        weighted._sampled, weighted._part = True, part
        return weighted

    def gradient(self) -> Tensor:
        """Return the gradient of the mean loss over all ranks' examples, (P,), the same on every rank.

        Cost: 3F of the share, F a forward, and one all-reduce of P numbers.
        """
        return self.ranks.sum(self.share.problem.part(divisor=self.divisor).gradient())

    def example_gradients(self, data: Data, measurement: Measurement | None = None) -> Tensor:
        """Return each example's gradient of its loss or a measurement, (P, N), as rank 0 has it.

        Args:
            data: the same on every rank.
            measurement: (outputs, targets) -> (N,); None: the loss of each, class weights of mean one.

        Cost: 3F of all of `data`.
        """
        loss = self._examples.normalised_loss
        rows = per_example_gradients(self.share.problem.model, loss, data, measurement=measurement)
        return self.ranks.from_first(rows).T

    def example_derivatives(self, directions: Tensor) -> Tensor:
        """Return the derivative of each example's own loss along directions, (P, K) -> (N, K), on the CPU.

        Of all ranks' examples, class weights of mean one. Cost: 2F of the share a direction.
        """
        problem, loss = self.share.problem, self._examples.normalised_loss
        return torch.cat(
            self.ranks.gather(directional_derivatives(problem.model, loss, problem.data, directions).cpu())
        )

    def randn(self, num_columns: int, generator: Seed = None) -> Tensor:
        """Return the random vectors that one process would draw, the same on every rank."""
        drawn = super().randn(num_columns, generator)
        self.ranks.agree(drawn[:8], SAME_SEEDS)
        return drawn

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return LᵀR as rank 0 has it: no rank may stop alone because its last digit differs."""
        return self.ranks.from_first(super().gram(left, right))

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return <l, r> column by column, as rank 0 has it."""
        return self.ranks.from_first(super().inner(left, right))

    # ----------------------------------------------------------------- single examples and layers
    @property
    def is_whole(self) -> bool:
        """Whether this is the mean over all examples, each once."""
        return not self._sampled

    def own(self) -> DataOperator:
        """Return the sum over this rank's examples, divided by n."""
        if self._sampled:
            raise ValueError("traces and rows belong to the whole data: pass the operator itself, not a sample")
        return self.share.part(divisor=self.divisor)

    def own_places(self, chosen: Tensor) -> Tensor:
        """Return those of the examples `chosen` of all ranks that are this rank's, numbered in its share."""
        return self._examples.own_places(chosen)[0]

    @property
    def parameter_slices(self) -> tuple[slice, ...]:
        """Each parameter's place in the flat vector."""
        return self.share.parameter_slices

    def layers(self, *, max_size: int) -> list[Layer]:
        """Return the linear and convolutional layers with at most `max_size` inputs and outputs."""
        return self.share.layers(max_size=max_size)

    def layer_factors(
        self, layers: list[Layer], *, generator: torch.Generator | None = None
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield activations and signals of this rank's batches, with labels drawn by its own stream.

        See DataOperator; sums over all examples are sums over the ranks.
        """
        yield from self.own().layer_factors(layers, generator=self.own_generator(generator))

    @property
    def is_psd(self) -> bool:
        """Whether every share's matrix is known to be."""
        return self.share.is_psd

    @property
    def num_examples(self) -> int:
        """N, examples of all ranks together."""
        return self._examples.num

    @property
    def divisor(self) -> float:
        """n, by which a product divides the sum over all ranks' examples."""
        return self._examples.divisor

    @property
    def _own_part(self) -> LinearOperator | None:
        if self._part is None and not self._sampled:
            self._part = self.own()
        return self._part
