"""Curvature matrices of models whose parameters, and vectors, are cut up over the ranks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from curvlab.curvature.example_rows import output_traces
from curvlab.linalg import LinearOperator
from curvlab.parallel.examples import SEEDS, SharedExamples
from curvlab.parallel.sharded.model import ShardedModel
from curvlab.problem import Batches, Data, output_loss
from curvlab.problem.batch import Batch, Inputs
from curvlab.ranks import Ranks


class ShardedOperator(LinearOperator):
    """1/n sum over all ranks' examples of symmetric matrices, on vectors of which rank r holds P_r of P numbers.

    Solvers, spectra and estimators of curvlab run on it unchanged, as on DataParallelOperator: a vector is what
    this rank holds of it, (P_r,) or (P_r, K), and inner products are summed over the ranks. Per rank they need 1/R
    of the memory. `own_part` and `whole` go between the two for small models.

    Args:
        model: under `fully_shard`, see `shard_parameters` and `ShardedModel`.
        loss: see GaussNewtonOperator.
        share: this rank's own examples; shares may be of any sizes.
        batch_size: examples at a time.
        ranks: the process group's by default.

    Memory beside the parts: one unit's parameters, its part of a vector and its gradients, whole; the root's (what
    belongs to no unit: embeddings and head of a language model) likewise, as long as a batch takes; activations
    between the units of one batch. Ranks with fewer batches than others repeat an example, with weight 0.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, share: Data, *, batch_size: int = 8, ranks: Ranks | None = None
    ) -> None:
        ranks = Ranks.current() if ranks is None else ranks
        self.model = ShardedModel(model, ranks)
        super().__init__(self.model.layout.num_parameters, dtype=self.model.dtype, device=self.model.device)
        self.ranks = ranks
        self.num_rows = self.model.layout.num_rows
        self.loss = output_loss(loss)
        self._source = Batches(share, batch_size=batch_size, device=self.device, dtype=self.dtype)
        self._batches: list[tuple[Batch, float]] | None = None  # of a sample, with weights
        self._divisor: float | None = None
        self._examples = SharedExamples(
            self.ranks,
            lambda: self._source.num_examples,
            lambda: sum(self.loss.count(targets) for targets in self._source.targets()),
            is_mean=self.loss.reduction == "mean",
        )

    @abstractmethod
    def _add_products(self, inputs: Inputs, targets: Tensor, rows: Tensor, total: Tensor, weight: float) -> None:
        """Add weight times this batch's matrix times each row of (K, P_r) to the same row of `total`."""

    @torch.inference_mode(False)
    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P_r, K) -> (P_r, K)."""
        rows = vectors.detach().T.contiguous()
        total = torch.zeros_like(rows)
        if len(rows) == 0:
            return total.T
        for (inputs, targets), weight in self._in_step():
            with self.model.set_up():
                self._add_products(inputs, targets, rows, total, weight)
        return total.div_(self.divisor).T

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> ShardedOperator:
        """Return the operator on `batch_size` of all ranks' examples, see DataParallelOperator.

        With probabilities the examples go through the model one by one.
        """
        mine, factors, divisor = self._examples.draw(batch_size, generator, probabilities)
        sampled = copy.copy(self)
        sampled._divisor = divisor
        if factors is None:
            batches = self._source.select(mine) if len(mine) else []
            sampled._batches = [(batch, 1.0) for batch in batches]
        else:
            sampled._batches = [
                (self._source.select(mine[i : i + 1])[0], float(factors[i])) for i in range(len(mine))
            ]
        return sampled

    def select(self, indices: Tensor) -> ShardedOperator:
        """Return the operator on these of all ranks' examples, (K,) numbers through the shares in ranks' order."""
        if len(indices) == 0 or not 0 <= int(indices.min()) <= int(indices.max()) < self.num_examples:
            raise ValueError(
                f"indices must be numbers of the {self.num_examples} examples, got {indices.tolist()}"
            )
        mine, _ = self._examples.own_places(indices)
        batches = self._source.select(mine) if len(mine) else []
        chosen = copy.copy(self)
        chosen._batches = [(batch, 1.0) for batch in batches]
        counts = self.ranks.gather(sum(float(self.loss.count(targets)) for _, targets in batches))
        chosen._divisor = sum(counts) if self.loss.reduction == "mean" else 1.0
        return chosen

    def weighted(self, weights: Tensor) -> ShardedOperator:
        """Return 1/n Σ_i w_i A_i over all ranks' examples (DataOperator.weighted), by this rank's own `weights`.

        All ranks call it. The examples go through the model one by one. Memory: a copy of this rank's examples.
        """
        num_own = self._source.num_examples
        whole = self._batches is None and weights.shape == (num_own,)
        problem = (
            "" if whole else f"need one weight for each of its {num_own} examples, got {tuple(weights.shape)}"
        )
        if not problem and not bool(((weights >= 0) & weights.isfinite()).all()):
            problem = "weights must be finite and not negative"
        for rank, found in enumerate(self.ranks.gather(problem)):  # one rank must not stop alone
            if found:
                raise ValueError(f"rank {rank}: {found}")
        chosen = copy.copy(self)
        chosen._batches = [
            (self._source.select(torch.tensor([index]))[0], weight)
            for index, weight in enumerate(weights.tolist())
            if weight > 0
        ]
        chosen._divisor = self.divisor
        return chosen

    def whole_in_step(self) -> Iterator[tuple[Batch, float]]:
        """Yield this rank's batches in the order of its data with weight 1, and with 0 while others have some."""
        if self._batches is not None:
            raise ValueError("this takes the whole data: pass the operator itself, not a sample of it")
        everything = copy.copy(self)
        everything._source = self._source.in_fixed_order()
        return everything._in_step()

    def _in_step(self) -> Iterator[tuple[Batch, float]]:
        """Yield batches with their weights; where only other ranks still have some, an example with weight 0."""
        weighted = ((batch, 1.0) for batch in self._source) if self._batches is None else iter(self._batches)
        spare: Batch | None = None
        while True:
            found = next(weighted, None)
            left = self.ranks.sum(torch.tensor(0 if found is None else 1))
            if not bool(left):
                return
            if found is None:
                spare = self._source.select(torch.zeros(1, dtype=torch.long))[0] if spare is None else spare
                yield spare, 0.0
            else:
                yield found

    @torch.inference_mode(False)
    def gradient(self) -> Tensor:
        """Return this rank's part of the gradient of the mean loss over all ranks' examples, (P_r,)."""
        total = torch.zeros(self.num_rows, dtype=self.dtype, device=self.device)
        for (inputs, targets), weight in self._in_step():
            with self.model.set_up():
                recorded = self.model.record(inputs)
                (outputs,) = recorded.values
                self.loss.check(outputs, targets)
                recorded.pull_back(weight * self.loss.gradient(outputs, targets), row=total)
        return total / self.divisor

    # --------------------------------------------------------------------------------- the vectors
    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return LᵀR, summed over the ranks."""
        return self.ranks.sum(super().gram(left, right))

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return <l, r> column by column, summed over the ranks."""
        return self.ranks.sum(super().inner(left, right))

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        """Return this rank's part of the vectors that one process would draw (with a CPU's generator)."""
        drawn = self.model.layout.randn(
            num_columns, generator, torch.empty(0, dtype=self.dtype, device=self.device)
        )
        after = torch.zeros(1)
        if generator is not None:  # a number from where they have come to, on whatever device they draw
            after = torch.rand(1, generator=generator.clone_state(), device=generator.device).cpu()
        self.ranks.agree(after, f"the numbers that they draw: {SEEDS}")
        return drawn.contiguous()

    def tensor_slices(self, sizes: Sequence[int]) -> list[slice]:
        """Return each parameter's place in this rank's part of a vector; `sizes` are those of whole ones."""
        pieces = [piece.shape.numel() for piece in self.model.layout.pieces]
        if list(sizes) != pieces:
            raise ValueError(
                "tensor_sizes of a sharded model must be those of its parameters, cut as they are: "
                "[p.numel() for p in model.parameters() if p.requires_grad]"
            )
        return list(self.model.layout.slices)

    def own_part(self, vectors: Tensor) -> Tensor:
        """Return this rank's part of whole vectors, (P,) or (P, K)."""
        return self.model.layout.own_part(vectors)

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors of which every rank gives its part, whole on every rank: for small models."""
        return self.model.layout.whole(vectors)

    def to_dense(self, *, chunk_size: int = 256) -> NoReturn:
        """Raise: a dense matrix would have to lie on one rank."""
        raise NotImplementedError("a sharded operator has no dense form: take DataParallelOperator")

    # ---------------------------------------------------------------------------------- the examples
    @property
    def num_examples(self) -> int:
        """N, examples of all ranks together."""
        return self._examples.num

    def own_targets(self) -> Iterator[Tensor]:
        """Yield the targets of this rank's examples."""
        return self._source.targets()

    @property
    def divisor(self) -> float:
        """n, by which a product divides the sum over all ranks' examples."""
        return self._examples.divisor if self._divisor is None else self._divisor


class ShardedGaussNewtonOperator(ShardedOperator):
    """The mean Gauss-Newton matrix, see GaussNewtonOperator; J v by forward mode.

    Cost of a product, in forwards F of the share: 5F, and F for every batch; each unit's parameters are gathered
    three times, and its part of the vector once.
    """

    @property
    def is_psd(self) -> bool:
        """True, as for GaussNewtonOperator."""
        return True

    def _add_products(self, inputs: Inputs, targets: Tensor, rows: Tensor, total: Tensor, weight: float) -> None:
        recorded = self.model.record(inputs)
        self.loss.check(recorded.values[0], targets)
        for index, (vector, row) in enumerate(zip(rows, total, strict=True)):
            outputs, tangents = self.model.push_forward(inputs, vector)
            curved = weight * self.loss.hessian_product(outputs, targets, tangents)
            recorded.pull_back(curved, row=row, keep=index + 1 < len(rows))

    @torch.inference_mode(False)
    def quadratic_forms(self, vectors: Tensor) -> Tensor:
        """Return vᵀG v for each column, (P_r, K) -> (K,), fp64, by forward passes alone: 2F each."""
        total = torch.zeros(vectors.shape[1], dtype=torch.float64, device=self.device)
        for (inputs, targets), weight in self._in_step():
            for index, vector in enumerate(vectors.T.contiguous()):
                outputs, tangents = self.model.push_forward(inputs, vector)
                curved = self.loss.hessian_product(outputs, targets, tangents)
                total[index] += weight * (tangents * curved).double().sum()
        return self.ranks.sum(total) / self.divisor

    @torch.inference_mode(False)
    def output_curvatures(self) -> Tensor:
        """Return N/n tr(S_i) of all ranks' examples, (N,), fp64, see curvlab.curvature.output_curvatures.

        The scores of importance sampling that need no gradient: `importance_probabilities(scores, uniform=0.1)`
        are weights for `sample` and for `Lissa`. Exact traces, `Rows` and `Ekfac` need gradients of single
        examples layer by layer, which a sharded operator does not form. Cost: one forward of the data.
        """
        own = []
        for (inputs, targets), weight in self.whole_in_step():
            with self.model.set_up():
                (outputs,) = self.model.record(inputs).values
            self.loss.check(outputs, targets)
            if weight:
                own.append(output_traces(self.loss, outputs, targets).double().cpu())
        return torch.cat(self.ranks.gather(torch.cat(own))) * (self.num_examples / self.divisor)


class ShardedHessianOperator(ShardedOperator):
    """The mean Hessian, see HessianOperator, by reverse over forward differentiation.

    H v = ∇(∇Lᵀv), where ∇Lᵀv = ∇l(h)ᵀ ḣ for outputs h and their derivative ḣ = J v: pulled back to the parameters
    are S ḣ from h and ∇l(h) from ḣ. Cost of a product, in forwards F of the share: about 8F.
    """

    def _add_products(self, inputs: Inputs, targets: Tensor, rows: Tensor, total: Tensor, weight: float) -> None:
        for vector, row in zip(rows, total, strict=True):
            recorded = self.model.record(inputs, vector)
            outputs, tangents = recorded.values
            self.loss.check(outputs, targets)
            curved = self.loss.hessian_product(outputs, targets, tangents)
            recorded.pull_back(weight * curved, weight * self.loss.gradient(outputs, targets), row=row)
