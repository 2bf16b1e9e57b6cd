"""How many examples and vectors a pass takes at once: from a budget of memory, and fewer when memory runs out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from curvlab.problem.batch import Batch, Inputs, take
from curvlab.problem.model_function import ModelFunction

# Without a budget, a pass may fill this share of what is free. It only ever lowers the default number of examples.
SHARE_OF_FREE = 0.8
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")

Value = TypeVar("Value")


class MemoryWarning(UserWarning):
    """A pass was cut into smaller ones, since memory ran out or a budget asked for it."""


@dataclass
class Estimate:
    """What a product of one kind takes, found once for an operator and its samples.

    Attributes:
        needed: (examples, vectors) -> bytes.
        fitting: examples and vectors that were found to fit.
    """

    needed: Callable[[int, int], float]
    fitting: tuple[int, int] = (0, 0)


@dataclass
class PassSize:
    """Examples and vectors at a time; an operator and its samples share one, so that they learn once.

    Attributes:
        examples: at most so many in a pass; None: batches as they come.
        columns: at most so many vectors together.
        divisible: whether a batch may be cut; not where its examples have weights by their places.
        budget: in bytes; None: a share of what is free.
        given: whether the user chose the number of examples, so that without a budget nothing is estimated.
        current: examples in the pass that is under way.
    """

    examples: int | None
    columns: int
    divisible: bool = True
    budget: float | None = None
    given: bool = False
    current: int = 1

    @property
    def estimates(self) -> bool:
        """Whether passes are estimated beforehand: not where the user chose their size and gave no budget."""
        return self.budget is not None or not self.given

    def columns_at_once(self, most: int) -> int:
        """Return how many of at most so many vectors a pass takes together."""
        return min(self.columns, most)

    def fit(self, estimate: Estimate, *, examples: int, columns: int, device: torch.device) -> None:
        """Lower the numbers, with a MemoryWarning, until the estimate for so many fits into the budget."""
        wanted = (min(self.examples or examples, examples), min(self.columns, columns))
        if wanted[0] <= estimate.fitting[0] and wanted[1] <= estimate.fitting[1]:
            return
        budget = self.budget or share_of_free(device)
        fitting = estimate.fitting = largest_fit(
            estimate.needed, examples=wanted[0], columns=wanted[1], budget=budget
        )
        if fitting == wanted:
            return
        self.examples = fitting[0]
        self.columns = fitting[1] if fitting[1] < wanted[1] else self.columns
        warnings.warn(
            f"{wanted[0]} examples and {wanted[1]} vectors at a time would take about "
            f"{estimate.needed(*wanted) / 2**20:.3g} MiB, more than the {budget / 2**20:.3g} MiB that "
            f"{'are given' if self.budget else 'may be used'}: a pass takes {fitting[0]} examples and "
            f"{fitting[1]} vectors.",
            MemoryWarning,
            stacklevel=2,
        )

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Cut a batch into passes."""
        inputs, targets = batch
        size = self.examples_at_once(len(targets))
        if size >= len(targets):
            yield batch
            return
        for start in range(0, len(targets), size):
            rows = slice(start, start + size)
            yield take(inputs, rows), targets[rows]

    def examples_at_once(self, count: int, at_most: int | None = None) -> int:
        """Return how many of `count` examples the next pass takes."""
        self.current = min(count, at_most or count, (self.examples or count) if self.divisible else count)
        return self.current

    def run(self, compute: Callable[[], Value], *, columns: int) -> Value:
        """Return what `compute` returns; each time that memory runs out, halve the larger number and start again.

        Args:
            compute: reads the numbers from here.
            columns: how many vectors there are.

        Raises:
            the allocator's own error, where one example and one vector do not fit.
        """
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                examples = self.current if self.divisible else 1
                columns = min(self.columns, columns)
                if examples == columns == 1:
                    error.add_note(NOTHING_LEFT)
                    raise
            # Here the error is gone, and with it the frames that held the failed pass.
            if examples >= columns:
                self.examples = examples = -(-examples // 2)
            else:
                self.columns = columns = -(-columns // 2)
            _empty_caches()
            warnings.warn(
                f"memory ran out: a pass now takes {examples} examples and {columns} vectors at a time, "
                "and this one starts again. Pass batch_size or memory_budget to begin with less.",
                MemoryWarning,
                stacklevel=2,
            )


NOTHING_LEFT = (
    "One example and one vector at a time do not fit: with low_memory=True a Gauss-Newton product holds what a "
    "gradient step holds; else shorter sequences, lower precision, or fewer trainable parameters."
)


def with_halving(compute: Callable[[int], Value], size: int) -> Value:
    """Return compute(size), with half the examples at a time whenever memory runs out."""
    passes = PassSize(examples=size, columns=1)
    return passes.run(lambda: compute(passes.examples_at_once(size)), columns=1)


def halved(examples: int, columns: int) -> tuple[int, int]:
    """Halve the larger of the two."""
    return (-(-examples // 2), columns) if examples >= columns else (examples, -(-columns // 2))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator of the GPU or the CPU, or Python itself, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


def free_memory(device: torch.device) -> int | None:
    """Return bytes that a process may still take on the device, or on the machine; None where nobody tells."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def share_of_free(device: torch.device) -> float:
    """Return the budget where none is given; infinite where nobody tells how much is free."""
    free = free_memory(device)
    return float("inf") if free is None else SHARE_OF_FREE * free


def activation_bytes(function: ModelFunction, inputs: Inputs, *, fused: bool, to_head: bool) -> int:
    """Return bytes that a recorded forward of the first example keeps for its backward, parameters left out.

    Args:
        function: the model.
        inputs: of a batch; one example is run.
        fused: whether attention runs by the model's own kernels.
        to_head: stop before the last layer of a language model, whose logits are never held as a whole.

    Cost: one forward of one example.
    """
    one = take(inputs, slice(0, 1))
    # A view would show the storage of the whole batch.
    one = one.clone() if isinstance(one, Tensor) else {name: value.clone() for name, value in one.items()}
    values = [value.requires_grad_() for value in function.parameters]
    # Storages by identity, not by address: on the meta device, where a model can be measured before it is loaded,
    # they have none.
    own = {id(storage): storage for storage in _storages((*values, *function.model.buffers()))}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        (storage,) = _storages([tensor])
        if id(storage) not in own:
            kept[id(storage)] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if to_head:
            function.head_input(values, one, fused=fused)
        else:
            function(values, one, fused=fused)
        return sum(storage.nbytes() for storage in kept.values())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def largest_fit(
    needed: Callable[[int, int], float], *, examples: int, columns: int, budget: float
) -> tuple[int, int]:
    """Return the most examples and columns that fit: the larger of the two is halved until they do, or both are 1.

    Args:
        needed: (examples, columns) -> bytes.
        examples: in the largest batch.
        columns: together.
        budget: in bytes.
    """
    while needed(examples, columns) > budget and (examples > 1 or columns > 1):
        examples, columns = halved(examples, columns)
    return examples, columns


def _empty_caches() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
