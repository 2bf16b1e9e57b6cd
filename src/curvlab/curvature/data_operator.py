"""What all curvature matrices share: a mean over data of matrices that belong to single examples."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Self, TypeVar, overload

import torch
from torch import Tensor, nn

from curvlab.curvature.column_sums import ColumnSums
from curvlab.curvature.jacobian_products import Columns, use_vmap
from curvlab.curvature.layers import Layer, find_layers, layer_factors
from curvlab.linalg import ExampleWeights, LinearOperator, SumOperator
from curvlab.problem.batch import Batch, Inputs, without_graph
from curvlab.problem.batches import Batches, Data
from curvlab.problem.function_loss import FunctionLoss, try_on_first_examples
from curvlab.problem.known_losses import Loss, output_loss
from curvlab.problem.memory import (
    MemoryWarning,
    PassSize,
    activation_bytes,
    largest_fit,
    share_of_free,
)
from curvlab.problem.model_function import ModelFunction
from curvlab.problem.weighted_loss import WeightedLoss, select_with_places, unweighted

DEFAULT_BATCH_SIZE = 512

Value = TypeVar("Value")


class DataOperator(LinearOperator):
    """1/n sum over examples of symmetric matrices, applied batch by batch.

    n is what the loss's mean divides by: examples, predicted tokens, or examples times outputs (nn.MSELoss);
    1 for reduction="sum". Products do not depend on how the data is cut into batches.

    Args:
        model: any module in eval mode; parameters that require gradients, in named_parameters() order. The
            operator reads their values at each product, by name: train further, or load other weights, and the
            matrix changes. In nn.Embedding the row of padding_idx is a parameter like any other: the outputs
            depend on it, though training leaves it alone.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, weights and smoothing included; or any mean
            over examples, a function of (outputs, targets), whose derivatives autograd takes (`FunctionLoss`).
        data: a pair of tensors, a map-style dataset, or a re-iterable of (inputs, targets) batches; see Batches.
            Mappings with their labels inside, as data sets and collators of Hugging Face give them, are read as
            the model's own loss reads them (`OwnLabels`). The same at each pass, or refused (`fixed_loader`).
        batch_size: examples at a time, for pairs and datasets; 512 by default, or what fits into free memory, in
            which it is linear. Whatever is given, it halves when memory runs out, with a warning.
        memory_budget: bytes that a product may hold beside parameters and vectors; batches are cut, and vectors
            taken in turns, so that it does, from an estimate: see pass_size.
        columns: how K vectors share the work: "vmap" together, "loop" one by one, "auto" as measured.
    """

    # With vmap, activations are held once a column: more columns than this are taken in turns.
    max_columns = 32

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Data,
        *,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        columns: Columns = "auto",
    ) -> None:
        if columns not in ("auto", "vmap", "loop"):
            raise ValueError(f"columns must be 'auto', 'vmap' or 'loop', got {columns!r}")
        self.function = ModelFunction(model)
        self.function.check_mode()
        self.loss = output_loss(loss)
        self.columns: Columns = columns
        if memory_budget is not None and (not isinstance(memory_budget, int | float) or not memory_budget >= 1):
            raise ValueError(f"memory_budget is in bytes, at least 1, got {memory_budget!r}: 2e9 for 2 GB")
        self.memory_budget = memory_budget
        self._fits = memory_budget is None and batch_size is not None  # then nothing has to be estimated
        self._pass_size = PassSize(examples=None, columns=self.max_columns)
        batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        self._source = Batches.of(self.function, data, batch_size=batch_size)
        self._batches: Iterable[Batch] = self._source
        self._divisor: float | None = None
        super().__init__(self.function.num_parameters, dtype=self.function.dtype, device=self.function.device)
        if isinstance(self.loss, FunctionLoss):
            try_on_first_examples(self.loss, self.function, self._source)

    @abstractmethod
    def _add_products(self, inputs: Inputs, targets: Tensor, rows: Tensor, sums: ColumnSums) -> None:
        """Add the sum over a batch of example matrices times each row of (K, P), undivided."""

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
        return self.within_memory(lambda: self._product(rows, total), num_columns=len(rows))

    def _product(self, rows: Tensor, total: Tensor) -> Tensor:
        divisor = self._known_divisor
        sums = ColumnSums(total, first=True, scale=1.0 if divisor is None else 1 / divisor)
        count = 0.0
        for inputs, targets in self.passes(len(rows)):
            for start in range(0, len(rows), self._pass_size.columns):
                block = slice(start, start + self._pass_size.columns)
                self._add_products(inputs, targets, rows[block], sums.block(block))
            count += self.loss.count(targets)
            sums = replace(sums, first=False)
        return (total if divisor is not None else total.div_(self._full_divisor(count))).T

    def passes(self, num_columns: int = 1) -> Iterator[Batch]:
        """Yield `batches`, cut as far as memory asks for it."""
        for batch in self._batches:
            if not self._fits and len(batch[1]) > 1:
                self._fit(batch, num_columns)
            yield from self._pass_size.pieces(batch)

    def examples_at_once(self, wanted: int) -> int:
        """Return how many of `wanted` examples a pass may take, as products have learnt."""
        return min(wanted, self._pass_size.examples or wanted)

    def within_memory(self, compute: Callable[[], Value], *, num_columns: int = 1) -> Value:
        """Return compute(), which reads `passes`; it starts again with smaller ones when memory runs out."""
        return self._pass_size.run(compute, columns=num_columns)

    def _fit(self, batch: Batch, num_columns: int) -> None:
        """Lower the size of a pass until the estimate says that it fits."""
        (inputs, targets), size = batch, self._pass_size
        wanted = (min(size.examples or len(targets), len(targets)), min(size.columns, num_columns))
        if size.known_to_fit(*wanted):
            return
        if size.estimate is None:
            size.estimate = self._activation_bytes(inputs, targets)
        for_one, fixed = size.estimate
        together = use_vmap(self.function, self.columns, inputs)

        def needed(examples: int, columns: int) -> float:
            return fixed + examples * for_one * self._copies(columns if together else 1)

        budget = self.memory_budget or share_of_free(self.device)
        fitting = largest_fit(needed, examples=wanted[0], columns=wanted[1], budget=budget)
        size.fitting = fitting
        if fitting == wanted:
            return
        size.examples, size.columns = fitting
        warnings.warn(
            f"{wanted[0]} examples and {wanted[1]} vectors at a time would take about "
            f"{needed(*wanted) / 2**20:.3g} MiB, more than the {budget / 2**20:.3g} MiB that "
            f"{'are given' if self.memory_budget else 'may be used'}: a pass takes {fitting[0]} examples and "
            f"{fitting[1]} vectors.",
            MemoryWarning,
            stacklevel=2,
        )

    def _activation_bytes(self, inputs: Inputs, targets: Tensor) -> tuple[float, float]:
        """Return bytes recorded for an example, and those that do not depend on their number."""
        return activation_bytes(self.function, inputs, fused=False, to_head=False), 0.0

    @abstractmethod
    def _copies(self, columns: int) -> float:
        """Return how many recorded forwards a product with K vectors holds, at most, as measured."""

    @overload
    def sample(self, batch_size: int, generator: torch.Generator | None = None, weights: None = None) -> Self: ...

    @overload
    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, weights: Tensor | None = None
    ) -> LinearOperator: ...

    @torch.inference_mode(False)
    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, weights: Tensor | None = None
    ) -> LinearOperator:
        """Return the operator on `batch_size` examples drawn with replacement: unbiased for this one.

        For language models an example is a sequence, and the divisor is batch_size times the mean number of
        predicted tokens, not the number in the batch: a random divisor would bias the product. A sample keeps the
        whole data: its `num_examples` is still N, and a sample of it draws from all N again.

        With weights q_i, (N,), example i is drawn with probability q_i / Σq and its matrix weighted by
        Σq / (N q_i), which keeps the mean. With q_i ∝ tr(G_i) few examples with much curvature cannot do harm:
        condition C.1 holds with C = 1 (`certified_constant` has the proof). Weights must be positive wherever G_i
        is not 0; in the order in which `Batches` numbers the examples. The logits of a language model's batch are
        then taken as a whole.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if weights is not None:
            drawn, factors = ExampleWeights(weights, self.num_examples).draw(batch_size, generator)
            parts = self.weighted_parts(drawn, factors)
            return parts[0] if len(parts) == 1 else SumOperator(parts)
        source = generator.device if generator is not None else torch.device("cpu")
        num_examples = self._source.num_examples
        indices = torch.randint(num_examples, (batch_size,), generator=generator, device=source)
        return self.part(indices, divisor=batch_size / num_examples * self._full_divisor(self.total_count))

    @torch.inference_mode(False)
    def part(self, indices: Tensor | None = None, *, divisor: float) -> Self:
        """Return the sum over the examples `indices` (repeats allowed; None: all) divided by `divisor`.

        Parts of one mean, for whoever adds them up: with the same divisor for each.
        """
        chosen = copy.copy(self)
        chosen.loss = unweighted(self.loss)
        if indices is not None:
            chosen._batches = self._source.select(indices)
        chosen._divisor = divisor
        return chosen

    @torch.inference_mode(False)
    def weighted_parts(self, drawn: Tensor, weights: Tensor, *, divisor: float | None = None) -> list[Self]:
        """Return operators with the sum 1/B Σ_b w_b G_i(b), i = drawn, (B,): one for each shape of example.

        With a divisor the sum over b is divided by that, as in `part`.
        """
        if divisor is None:
            divisor = len(drawn) / self.num_examples * self._full_divisor(self.total_count)
        parts = []
        for batch, places in select_with_places(self._source, drawn):
            part = copy.copy(self)
            part.loss = WeightedLoss(unweighted(self.loss), weights[places].to(self.device, self.dtype))
            part._batches, part._divisor = [batch], divisor
            part._pass_size, part._fits = PassSize(None, self.max_columns, divisible=False), True
            parts.append(part)
        return parts

    @property
    def num_examples(self) -> int:
        """N, examples in the whole data (sequences for language models), of a sample too."""
        return self._source.num_examples

    @property
    def batches(self) -> Iterable[Batch]:
        """The (inputs, targets) that a product sums over: the whole data, or the examples of a sample."""
        return self._batches

    @property
    def divisor(self) -> float:
        """n, by which a product divides the sum over `batches`; see `sample` for that of a sample.

        Cost: one pass over the data, once, where targets cannot be read without it.
        """
        return self._full_divisor(self.total_count) if self._divisor is None else self._divisor

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
        for batch in self.batches:
            found = layer_factors(self.function, self.loss, batch, layers, generator=source)
            yield [(activations, signals / root) for activations, signals in found]

    @property
    def total_count(self) -> float:
        """Predictions in the whole data: what a mean divides by. Cost: as `divisor`."""
        if not hasattr(self, "_count"):
            self._count = sum(self.loss.count(targets) for targets in self._source.targets())
        return self._count

    @property
    def _known_divisor(self) -> float | None:
        """n, where no pass over the data is needed to count it; else None."""
        return self.divisor if self._divisor is not None or self._source.knows_targets else None

    def _full_divisor(self, count: float) -> float:
        if self.loss.reduction == "sum":
            return 1.0
        if count == 0:
            raise ValueError("every target is ignored (ignore_index): the mean over predictions has no terms")
        return count
