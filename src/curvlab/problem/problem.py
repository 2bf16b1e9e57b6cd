"""The one door for model, loss and data: opened, checked, moved to the model's device and counted once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.linalg import ExampleDraws, flatten
from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.data import Batches, Data
from curvlab.problem.losses import OutputLoss
from curvlab.problem.memory import Memory, rows_of, with_halving
from curvlab.problem.model_function import ModelFunction, check_finite, check_mode
from curvlab.problem.own_losses import EXAMPLES_TRIED, FunctionLoss, Loss, output_loss
from curvlab.problem.repeatable import check_examples_apart
from curvlab.progress import can_be_silent, progress_bar
from curvlab.seeding import Seed, as_generator
from curvlab.shown import Shown, Summary, counted

DEFAULT_BATCH_SIZE = 512

# Inputs and targets of some examples, and their weights, (B,), on the model's device; None: all of weight 1.
Piece = tuple[Inputs, Tensor, Tensor | None]
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False, repr=False)
class Problem(Shown):
    """The mean loss L(θ) = 1/n Σ_i w_i l(h(x_i; θ), y_i) of a model over data, for whoever differentiates it.

    n is what the loss's mean divides by (`divisor`). Weights are multiplicities: an example of weight 2 counts
    twice, n stays as it is.

    Open it by `Problem.of(model, loss, data)`. Every public function that takes (model, loss, data) begins with
    that line, so a problem may stand in the place of the three, and is then not opened again:

        problem = Problem.of(model, nn.CrossEntropyLoss(), train)
        gradient = problem.gradient()                        # (P,)
        op = GaussNewtonOperator(problem)                    # the same checks and the same count, not made again
        test = problem.with_data(test_set)                   # the same model and loss, other examples
        for inputs, targets, weights in problem.passes():    # on the device; weights (B,), or None
            outputs = problem.function(problem.parameters, inputs)
        losses = torch.cat(list(problem.map(losses_of)))     # a batch is halved whenever memory runs out

    Attributes:
        function: the model as a function of its trainable parameters.
        loss: its derivatives by the outputs.
        data: all examples, in batches, without weights.
        memory: how many examples and vectors a pass takes, as learnt.
        given_loss: what the user passed.
        weights: w, (N,), of all examples; None: 1 each.
        selected: the batches that are summed where they are some examples, as in `sample`; None: all of `data`.
        given_divisor: n, where it is another than all of the data has.
    """

    function: ModelFunction
    loss: OutputLoss
    data: Batches
    memory: Memory = field(default_factory=Memory)
    given_loss: Loss = None  # type: ignore[assignment]  # of a call that __post_init__ refuses
    weights: Tensor | None = None
    selected: Sequence[Piece] | None = None
    given_divisor: float | None = None

    def __post_init__(self) -> None:
        if isinstance(cast("object", self.function), nn.Module):
            raise TypeError("open it by Problem.of(model, loss, data): Problem(...) takes what is opened already")

    @classmethod
    def of(
        cls,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        data: Data | None = None,
        weights: Tensor | None = None,
        memory_budget: float | None = None,
        *,
        batch_size: int | None = None,
    ) -> Problem:
        """Open model, loss and data; or return the problem that stands in their place.

        Args:
            model: any module in eval mode; its parameters that require gradients, in named_parameters() order. Or
                a Problem, alone: then it is returned as it is.
            loss: nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, or any mean over examples, a function of
                (outputs, targets); see `output_loss`.
            data: a pair of tensors, a map-style data set, or a re-iterable of (inputs, targets) batches, also of
                Hugging Face; see `Batches`.
            weights: w, (N,), finite and not negative, in the order of the data.
            memory_budget: bytes that a pass may hold beside parameters and vectors; by default 80 % of what is
                free.
            batch_size: examples at a time, for pairs and data sets; 512 by default.

        Raises:
            ValueError: where the model depends on chance or on a batch's other examples (call model.eval()), the
                data is another at each pass, the loss is no mean over examples.

        Cost: some examples read twice, to see that they are the same; a forward of 3 examples, for losses without
        a closed form of 16 more.
        """
        if isinstance(model, Problem):
            if any(given is not None for given in (loss, data, weights, memory_budget, batch_size)):
                raise TypeError(
                    "a Problem stands in the place of model, loss, data and of what they are opened with: pass it "
                    "alone, and give weights, memory_budget and batch_size to Problem.of"
                )
            return model
        if loss is None:
            raise TypeError("pass model, loss and data, or a Problem in the place of the three")
        function = ModelFunction(model)
        check_mode(model)
        memory = Memory(budget=memory_budget, estimates=memory_budget is not None or batch_size is None)
        size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        known, batches = output_loss(loss), Batches.of(function, cast("Data", data), batch_size=size)
        whole = cls(function, known, batches, memory, loss).tried()
        return whole if weights is None else whole.weighted(weights)

    def summary(self) -> Summary:
        """Return model, loss and data in words."""
        loss, w = getattr(self.given_loss, "__name__", type(self.given_loss).__name__), self.weights
        weights = () if w is None else (f"weights from {float(w.min()):.3g} to {float(w.max()):.3g}",)
        return Summary(
            "problem:",
            f"{type(self.model).__name__} under {loss}",
            counted(self.num_examples, "example"),
            (f"{counted(self.num_parameters, 'parameter')} of {self.dtype} on {self.device}", *weights),
        )

    def tried(self) -> Problem:
        """Return itself, or raise where the model, or a loss of the user's own, is of no single examples."""
        if self.data.reads_single:
            check_examples_apart(self.function, self.data.select, self.num_examples)
        if isinstance(self.loss, FunctionLoss):
            trial = partial(self.loss.try_on_first_examples, self.function, self.data)
            with_halving(trial, min(EXAMPLES_TRIED, self.data.batch_size))
        return self

    # -------------------------------------------------------------------------------- what it is
    @property
    def model(self) -> nn.Module:
        """The module."""
        return self.function.model

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The current values of the trainable parameters, without graph."""
        return self.function.parameters

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.function.num_parameters

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and vectors."""
        return self.function.dtype

    @property
    def device(self) -> torch.device:
        """Of parameters and vectors."""
        return self.function.device

    @property
    def num_examples(self) -> int:
        """N, examples of the whole data (sequences for language models), of a sample too."""
        return self.data.num_examples

    @property
    def batches(self) -> Iterable[Batch]:
        """The (inputs, targets) that are summed, without their weights: for looking at, not for sums."""
        return self.data if self.is_whole else [piece[:2] for piece in self._pieces()]

    @property
    def is_whole(self) -> bool:
        """Whether all examples are summed, each once."""
        return self.selected is None and self.weights is None

    @cached_property
    def total_count(self) -> float:
        """Predictions in the whole data. Cost: one pass, once, where targets cannot be read without it."""
        return sum(self.loss.count(targets) for targets in self.data.targets())

    @cached_property
    def divisor(self) -> float:
        """n, by which a sum over `passes` is divided: see `sample` for that of a sample.

        Examples, predicted tokens, or examples times outputs (nn.MSELoss); 1 for reduction="sum".
        """
        return self._whole_divisor if self.given_divisor is None else self.given_divisor

    @property
    def _whole_divisor(self) -> float:
        if self.loss.reduction == "sum":
            return 1.0
        if self.total_count == 0:
            raise ValueError("every target is ignored (ignore_index): the mean over predictions has no terms")
        return self.total_count

    # --------------------------------------------------------------------------- other problems
    def with_data(self, data: Data, *, weights: Tensor | None = None, name: str = "test") -> Problem:
        """Return the same model and loss over other data; `name` is what error messages call them."""
        batches = Batches.of(self.function, data, batch_size=self.data.batch_size, name=name)
        other = replace(self, data=batches, weights=None, selected=None, given_divisor=None).tried()
        return other if weights is None else other.weighted(weights)

    def copied(self, dtype: torch.dtype | None = None, *, parameters: Tensor | None = None) -> Problem:
        """Return the same over a copy of the model, in another dtype or at other parameters, (P,)."""
        if self.selected is not None:
            raise ValueError("copy the problem itself, not a sample of it, whose examples are drawn already")
        function = ModelFunction(copy.deepcopy(self.model).to(dtype or self.dtype))
        if parameters is not None:
            with torch.no_grad():
                nn.utils.vector_to_parameters(parameters.to(function.dtype), function.live_parameters)
        return replace(
            self, function=function, data=self.data.in_dtype(function.dtype), memory=replace(self.memory)
        )

    def normalised(self) -> Problem:
        """Return an equal problem whose class weights have mean one over the data (`OutputLoss.normalised`)."""
        return replace(self, loss=self.loss.normalised(self.data.targets()))

    def weighted(self, weights: Tensor) -> Problem:
        """Return 1/n Σ_i w_i l_i with these multiplicities, (N,); examples of weight 0 are not read."""
        if self.selected is not None:
            raise ValueError("weights belong to the whole data: pass the problem itself, not a sample of it")
        return replace(self, weights=checked_weights(weights, self.num_examples).cpu())

    def of_every_example(self) -> Problem:
        """Return the same over the whole data in its fixed order, each example once, whatever its weight."""
        return replace(self, data=self.data.in_fixed_order(), weights=None, selected=None)

    def with_targets(self, targets: Sequence[Tensor], loss: OutputLoss) -> Problem:
        """Return the same inputs with other targets, one for each example, and the loss that reads them."""
        return replace(self, data=self.data.in_fixed_order().with_targets(targets), loss=loss)

    def part(
        self, indices: Tensor | None = None, *, weights: Tensor | None = None, divisor: float | None = None
    ) -> Problem:
        """Return the sum over the examples `indices` (repeats allowed; None: all) divided by `divisor`.

        Parts of one mean, for whoever adds them up: with the same divisor for each.

        Args:
            indices: numbers of examples, (B,).
            weights: of these, (B,); by default as the problem has them.
            divisor: n by default.
        """
        divisor = self._whole_divisor if divisor is None else divisor
        if indices is None:
            return replace(self, selected=None, given_divisor=divisor)
        if weights is None and self.weights is not None:
            weights = self.weights[indices.cpu()]
        return replace(self, selected=list(_selected(self.data, indices, weights)), given_divisor=divisor)

    def sample(self, batch_size: int, generator: Seed = None, probabilities: Tensor | None = None) -> Problem:
        """Return the problem of `batch_size` examples drawn with replacement: unbiased for this one.

        For language models an example is a sequence, and the divisor is batch_size times the mean number of
        predicted tokens, not the number in the batch: a random divisor would bias the result. A sample keeps the
        whole data: its `num_examples` is still N, and a sample of it draws from all N again.

        Args:
            batch_size: how many.
            generator: of the draws.
            probabilities: q, (N,), divided by their sum; example i is drawn with probability q_i and weighted by
                1 / (N q_i), which keeps the mean. Positive wherever example i counts. Uniform by default.
        """
        batch_size, generator = whole("batch_size", batch_size), as_generator(generator)
        divisor = batch_size / self.num_examples * self._whole_divisor
        if probabilities is None:
            source = generator.device if generator is not None else torch.device("cpu")
            drawn = torch.randint(self.num_examples, (batch_size,), generator=generator, device=source)
            return self.part(drawn, divisor=divisor)
        drawn, factors = ExampleDraws(probabilities, self.num_examples).draw(batch_size, generator)
        own = 1.0 if self.weights is None else self.weights[drawn]
        return self.part(drawn, weights=own * factors, divisor=divisor)

    # ------------------------------------------------------------------------------------ passes
    def passes(
        self, *, at_most: int | None = None, look: Callable[[Piece], None] | None = None
    ) -> Iterator[Piece]:
        """Yield (inputs, targets, weights) batch by batch, cut as far as memory has asked for it before.

        Args:
            at_most: examples at a time.
            look: called with each batch before it is cut, so that it may ask for smaller pieces.
        """
        for piece in self._pieces():
            if look is not None:
                look(piece)
            yield from self.memory.pieces(piece, at_most)

    def map(
        self,
        compute: Callable[[Inputs, Tensor, Tensor | None], Value],
        *,
        at_most: int | None = None,
        num_columns: int = 1,
        name: str = "",
    ) -> Iterator[Value]:
        """Yield compute(inputs, targets, weights) of each batch, in order.

        A batch is halved whenever memory runs out, with a MemoryWarning, and goes on where it was.

        Args:
            compute: of a batch's (B, ...) inputs and targets, and weights (B,) or None.
            at_most: examples at a time.
            num_columns: vectors that `compute` takes together, at most `memory.columns` of them.
            name: of a progress bar, which counts examples; none without a name.
        """
        with progress_bar(name, total=self.num_read, progress=bool(name)) as bar:
            for piece in self._pieces():
                rows = slice(0, 0)
                while rows.stop < len(piece[1]):
                    step = partial(self._next, compute, piece, rows.stop, at_most)
                    rows, value = self.memory.run(step, columns=num_columns)
                    yield value
                    bar.update(rows.stop - rows.start)

    @property
    def num_read(self) -> int:
        """How many examples a pass reads."""
        if self.selected is not None:
            return sum(len(targets) for _, targets, _ in self.selected)
        return self.num_examples if self.weights is None else int(self.weights.to(self.dtype).count_nonzero())

    def _next(
        self,
        compute: Callable[[Inputs, Tensor, Tensor | None], Value],
        piece: Piece,
        start: int,
        at_most: int | None,
    ) -> tuple[slice, Value]:
        """Compute from the rows of a batch that begin at `start`; return which they were."""
        rows = slice(start, start + self.memory.examples_at_once(len(piece[1]) - start, at_most))
        return rows, compute(*rows_of(piece, rows))

    def _pieces(self) -> Iterator[Piece]:
        if self.selected is not None:
            yield from self.selected
        elif self.weights is None:
            for inputs, targets in self.data:
                yield inputs, targets, None
        else:
            kept = self.weights.to(self.dtype).nonzero().flatten()  # what rounds to 0 there is 0 as well
            for indices in kept.split(self.data.batch_size) if len(kept) else ():
                yield from _selected(self.data, indices, self.weights[indices])

    @torch.inference_mode(False)
    @torch.no_grad()
    def outputs(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return h of a batch without graph, or raise where it is not finite or the targets do not fit."""
        outputs = self.function(self.parameters, inputs)
        check_finite(outputs)
        self.loss.check(outputs, targets)
        return outputs

    @torch.inference_mode(False)
    def gradient(self) -> Tensor:
        """Return ∇L = 1/n Σ w ∇l by the trainable parameters, (P,), scaled as HessianOperator's matrix is.

        For batches of different numbers of tokens it is not the mean of the batches' own gradients.

        Cost: one forward and one backward of the data.
        """
        total = torch.zeros(self.num_parameters, dtype=self.dtype, device=self.device)
        divisor = self.divisor
        for gradient in self.map(self._summed_gradient, name="gradient"):
            total += gradient
        return total / divisor

    def _summed_gradient(self, inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
        leaves = [value.detach().requires_grad_() for value in self.parameters]
        with torch.enable_grad():
            outputs = self.function(leaves, inputs)
            check_finite(outputs)
            self.loss.check(outputs, targets)
            value = self.loss.total(outputs, targets, weights)
            return flatten(torch.autograd.grad(value, leaves, materialize_grads=True))


class HasGradient(Protocol):
    """What knows its own way to the gradient of its mean loss: an operator over processes."""

    def gradient(self) -> Tensor:
        """Return ∇L, (P,), or this process's part of it."""
        ...


@can_be_silent
def mean_gradient(
    model: nn.Module | Problem | HasGradient,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Return ∇L = 1/n Σ ∇l by the trainable parameters, (P,): see `Problem.gradient`, and `Problem.of`.

    An operator of curvlab.parallel may stand in the place of model, loss and data, alone: then ∇L is over the
    examples of all processes.
    """
    if not isinstance(model, nn.Module | Problem):
        return model.gradient()
    return Problem.of(model, loss, data, batch_size=batch_size).gradient()


def _selected(data: Batches, indices: Tensor, weights: Tensor | None) -> Iterator[Piece]:
    """Yield some examples as batches, one for each shape of example."""
    if weights is None:
        yield from ((inputs, targets, None) for inputs, targets in data.select(indices))
        return
    for (inputs, targets), places in data.select_with_places(indices):
        yield inputs, targets, weights[places].to(data.device, data.dtype)


def checked_weights(weights: Tensor, num_examples: int) -> Tensor:
    """Return w of the mean loss L = 1/n Σ_i w_i l_i, (N,), without graph, or raise a ValueError.

    One convention: the sum is divided by n, as without weights, and never by the sum of the weights. A weight of 2
    is an example that stands twice in a data set whose n is not raised; 0 takes an example away and leaves the
    others as they were. For the mean over the sum of the weights, pass weights * len(weights) / weights.sum().
    """
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights are a tensor, ({num_examples},), got {type(weights).__name__}")
    if weights.shape != (num_examples,):
        raise ValueError(f"need one weight for each of {num_examples} examples, got shape {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("weights must be finite and not negative")
    if not bool(weights.any()):
        raise ValueError("all weights are 0: no example is left")
    return weights.detach()
