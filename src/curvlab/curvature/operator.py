"""What all curvature matrices share: a mean over data of matrices that belong to single examples."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from curvlab.curvature.layers import Layer, find_layers, layer_factors
from curvlab.curvature.linearise import Columns, ColumnSums, use_vmap
from curvlab.linalg import LinearOperator
from curvlab.problem import Data, Loss, ModelFunction, OutputLoss, Problem
from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.memory import Estimate, activation_bytes
from curvlab.problem.model_function import without_graph
from curvlab.problem.problem import Piece
from curvlab.progress import is_heard, progress_bar
from curvlab.ranks import SAME_SEEDS
from curvlab.seeding import Seed


class DataOperator(LinearOperator):
    """1/n sum over examples of symmetric matrices, applied batch by batch.

    n is what the loss's mean divides by: examples, predicted tokens, or examples times outputs (nn.MSELoss);
    1 for reduction="sum". Products do not depend on how the data is cut into batches.

    Args:
        model: any module in eval mode; parameters that require gradients, in named_parameters() order. The
            operator reads their values at each product, by name: train further, or load other weights, and the
            matrix changes. It is used by one thread at a time: products put values into the model itself, for
            their time, and another thread needs a copy, copy.deepcopy(model). In nn.Embedding the row of
            padding_idx is a parameter like any other: the outputs depend on it, though training leaves it alone.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, weights and smoothing included; or any mean
            over examples, a function of (outputs, targets), whose derivatives autograd takes (`FunctionLoss`).
        data: a pair of tensors, a map-style dataset, or a re-iterable of (inputs, targets) batches; see Batches.
            Mappings with their labels inside, as data sets and collators of Hugging Face give them, are read as
            the model's own loss reads them (`PairFromMapping`). The same at each pass, or refused.
        batch_size: examples at a time, for pairs and datasets; 512 by default, or what fits into free memory, in
            which it is linear. Whatever is given, it halves when memory runs out, with a warning.
        memory_budget: bytes that a product may hold beside parameters and vectors; batches are cut, and vectors
            taken in turns, so that it does, from an estimate: see pass_size.
        columns: how K vectors share the work: "vmap" together, "loop" one by one, "auto" as measured.

    Attributes:
        problem: model, loss and data, opened.
    """

    # With vmap, activations are held once a column: more columns than this are taken in turns.
    max_columns = 32

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        data: Data | None = None,
        *,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        columns: Columns = "auto",
    ) -> None:
        if columns not in ("auto", "vmap", "loop"):
            raise ValueError(f"columns must be 'auto', 'vmap' or 'loop', got {columns!r}")
        self.problem = Problem.of(model, loss, data, memory_budget=memory_budget, batch_size=batch_size)
        self.columns: Columns = columns
        self._estimate: list[Estimate] = []  # shared with all samples: found once, by the first product
        super().__init__(self.problem.num_parameters, dtype=self.problem.dtype, device=self.problem.device)

    def on(self, problem: Problem) -> Self:
        """Return the same matrix of another problem with the same model: of other examples, weights or divisor."""
        other = copy.copy(self)
        other.problem = problem
        return other

    @property
    def function(self) -> ModelFunction:
        """The model as a function of its trainable parameters."""
        return self.problem.function

    @property
    def loss(self) -> OutputLoss:
        """The loss's derivatives by the outputs."""
        return self.problem.loss

    @abstractmethod
    def _add_products(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None, rows: Tensor, sums: ColumnSums
    ) -> None:
        """Add the weighted sum over a batch of example matrices times each row of (K, P), undivided."""

    @torch.inference_mode(False)
    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P, K) -> (P, K), without autograd graph, also under torch.inference_mode().

        Cost: one pass over the data for `max_columns` vectors. Each column of the result is contiguous in memory.
        Vectors stored the same way are not copied: where K P is large, stack them as rows and pass the transpose.
        """
        # Each column contiguous, as the parameters are: strided columns would be copied again in every layer.
        rows = without_graph(vectors).T.contiguous()
        # Where P is large, a pass over (K, P) numbers costs as much as a layer: there is one for each batch.
        total = torch.empty_like(rows)
        if len(rows) == 0:
            return total.T
        return self.problem.memory.run(partial(self._product, rows, total), columns=len(rows))

    def _product(self, rows: Tensor, total: Tensor) -> Tensor:
        sums = ColumnSums(total, first=True, scale=1 / self.problem.divisor)
        silent = self.problem.selected is not None or not is_heard()
        work = 0 if silent else len(rows) * self.problem.num_read
        with nullcontext() if silent else progress_bar("product", total=work, part=len(rows)) as bar:
            for inputs, targets, weights in self.passes(len(rows)):
                size = min(self.problem.memory.columns, self.max_columns)
                for start in range(0, len(rows), size):
                    block = slice(start, start + size)
                    self._add_products(inputs, targets, weights, rows[block], sums[block])
                    if bar is not None:
                        bar.update(len(targets) * len(rows[block]))
                sums = replace(sums, first=False)
        return (total.zero_() if sums.first else total).T  # nothing is summed where all weights are 0

    def passes(self, num_columns: int = 1) -> Iterator[Piece]:
        """Yield the batches that a product of so many vectors sums over, cut as far as memory asks for it."""
        return self.problem.passes(look=partial(self._fit, num_columns))

    def _fit(self, num_columns: int, piece: Piece) -> None:
        """Lower the size of a pass until the estimate says that it fits."""
        inputs, targets, _ = piece
        memory = self.problem.memory
        if not memory.estimates or len(targets) == 1:
            return
        if not self._estimate:
            for_one, fixed = self._activation_bytes(inputs, targets)
            together = use_vmap(self.function, self.columns, inputs)
            self._estimate.append(Estimate(partial(self._needed, for_one, fixed, together)))
        columns = min(self.max_columns, num_columns)
        memory.fit(self._estimate[0], examples=len(targets), columns=columns, device=self.device)

    def _needed(self, for_one: float, fixed: float, together: bool, examples: int, columns: int) -> float:
        return fixed + examples * for_one * self._copies(columns if together else 1)

    def _activation_bytes(self, inputs: Inputs, targets: Tensor) -> tuple[float, float]:
        """Return bytes recorded for an example, and those that do not depend on their number."""
        return activation_bytes(self.function, inputs, fused=False, to_head=False), 0.0

    @abstractmethod
    def _copies(self, columns: int) -> float:
        """Return how many recorded forwards a product with K vectors holds, at most, as measured."""

    @torch.inference_mode(False)
    def sample(self, batch_size: int, generator: Seed = None, probabilities: Tensor | None = None) -> Self:
        """Return the operator on `batch_size` examples drawn with replacement: unbiased for this one.

        See `Problem.sample`. With probabilities q_i ∝ tr(G_i) few examples with much curvature cannot do harm:
        condition C.1 holds with C = 1 (`certified_constant` has the proof); the logits of a language model's batch
        are then taken as a whole.
        """
        return self.on(self.problem.sample(batch_size, generator, probabilities))

    @torch.inference_mode(False)
    def part(
        self, indices: Tensor | None = None, *, weights: Tensor | None = None, divisor: float | None = None
    ) -> Self:
        """Return the sum over some examples divided by `divisor`: see `Problem.part`."""
        return self.on(self.problem.part(indices, weights=weights, divisor=divisor))

    @torch.inference_mode(False)
    def weighted(self, weights: Tensor) -> Self:
        """Return 1/n Σ_i w_i A_i, A_i and n those of this operator: of weight 2, an example counts twice.

        As everywhere, weighted sums are divided by n, never by the sum of the weights: a weight of 0 takes an
        example away and leaves the others as they were.

        Args:
            weights: w, (N,), finite and not negative, in the order of the data.

        Cost: as without weights; logits of language models are taken as a whole.
        """
        return self.on(self.problem.weighted(weights))

    @property
    def num_examples(self) -> int:
        """N, examples in the whole data (sequences for language models), of a sample too."""
        return self.problem.num_examples

    @property
    def batches(self) -> Iterable[Batch]:
        """The (inputs, targets) that a product sums over: the whole data, or the examples of a sample."""
        return self.problem.batches

    @property
    def divisor(self) -> float:
        """n, by which a product divides the sum over `batches`; see `sample` for that of a sample.

        Cost: one pass over the data, once, where targets cannot be read without it.
        """
        return self.problem.divisor

    @property
    def parameter_slices(self) -> tuple[slice, ...]:
        """Each parameter's place in the flat vector."""
        return self.function.slices

    def layers(self, *, max_size: int) -> list[Layer]:
        """Return the linear and convolutional layers with at most `max_size` inputs and outputs."""
        return find_layers(self.function, max_size=max_size)

    def layer_factors(
        self, layers: list[Layer], *, generator: torch.Generator | None = None
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield for each batch every layer's activations a, (N, T, I), and signals g, (N, T, O).

        Signals are gradients of -log p of labels drawn from the model, divided by sqrt(n): summed over all
        examples, the outer products of sum_t g_t ⊗ a_t are an unbiased estimate of the layer's block of the
        Gauss-Newton matrix. Cost: 3F of the data.
        """
        source = generator if generator is not None else torch.Generator().manual_seed(0)
        root = self.divisor**0.5
        for batch in self.problem.batches:
            found = layer_factors(self.function, self.loss, batch, layers, generator=source)
            yield [(activations, signals / root) for activations, signals in found]


class MeanOverRanks(LinearOperator):
    """A mean over examples of which each of `ranks` holds some; vectors are whole (`DataParallelOperator`).

    Examples are numbered through the ranks in their order. Traces, importance, rows and Kronecker factors are
    computed by each rank from its own examples and put together; all methods but `own_places` may exchange
    numbers, so that every rank calls them, in the same order.
    """

    @property
    def is_whole(self) -> bool:
        """Whether this is the mean over all examples, each once: no sample of them, nor one with weights."""
        return True

    @abstractmethod
    def own(self) -> DataOperator:
        """Return the sum over this rank's examples, divided by what the mean over all divides by."""

    @abstractmethod
    def own_places(self, chosen: Tensor) -> Tensor:
        """Return those of the examples `chosen` that this rank holds, in its own numbering."""

    def own_generator(self, generator: torch.Generator | None) -> torch.Generator:
        """Return a generator for draws at this rank's own examples, from one that is seeded alike on all.

        Draws for different examples must be independent, so each rank has a stream of its own, seeded by the next
        number of the common one: an estimate then depends on how many ranks there are, within its error.
        """
        source = torch.Generator().manual_seed(0) if generator is None else generator
        seed = torch.randint(2**31, (1,), generator=source, device=source.device).cpu()
        self.ranks.agree(seed, SAME_SEEDS)
        return torch.Generator(source.device).manual_seed(int(seed) + self.ranks.rank)

    def of_all_examples(self, own: Tensor) -> Tensor:
        """Return one number for each example of all ranks, (N,), from those of `own()`.

        They are terms N_r/n s_i of N_r examples, whose mean is this rank's part; of N/n s_i the mean is whole.
        """
        shares = self.ranks.gather(own)
        num_examples = sum(map(len, shares))
        return torch.cat([share * (num_examples / len(share)) for share in shares])
