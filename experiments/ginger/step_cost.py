"""What a training step costs: counted operations, measured memory, measured time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from curvlab.training import Learner, Step, TrainingBatch, gradient_step
from experiments.shared.gauges import wall_clock, work_clock


@dataclass(frozen=True)
class Cost:
    """Of one call.

    Attributes:
        flops: 2 for each multiply-add of products of matrices and vectors (outer products that are added up
            included), of convolutions and of fused attention. Nothing else counts: no elementwise operation, so
            that all of Adam's own arithmetic is free, no norm, no BatchNorm, no decomposition of a small matrix.
        peak_bytes: most that was alive at one time: what is held between calls, and the tensors made by this one.
            On a GPU as its allocator counts. On a CPU the storages of all results of operations, which leaves out
            what a kernel keeps to itself (little, by PyTorch's profiler). The peak of a
            process's resident memory is no measure of a step: it holds the libraries and what the allocator has
            not given back, and can only grow.
        all_seconds: one for each repeat: on a CPU, processor time of all threads, which other processes lengthen
            little; on a GPU, elapsed time.
        wall_seconds: elapsed, least of the repeats.
    """

    flops: int
    peak_bytes: int
    all_seconds: tuple[float, ...]
    wall_seconds: float

    @property
    def seconds(self) -> float:
        """The least of `all_seconds`."""
        return min(self.all_seconds)


def step_cost(
    learner: Learner,
    batch: TrainingBatch,
    *,
    step: Step = gradient_step,
    num_warmup: int = 2,
    num_repeats: int = 3,
) -> Cost:
    """Return the cost of one training step, with all its forward and backward passes.

    Takes `num_warmup` + 2 + `num_repeats` steps: the parameters move. Where steps differ (Ginger measures its
    basis in every max(τ, 8)-th update), operations and memory are those of the two steps after `num_warmup`.

    Args:
        learner: its model and optimizer on one device, in the mode (train, eval) to be measured.
        batch: on the same device.
        step: `gradient_step`; for Ginger and QNG `curvature_step` or `shared_curvature_step`, in which the
            gradient of sampled labels is included.
        num_warmup: steps before the first that is measured: optimizers create their state in them.
        num_repeats: steps that are timed.
    """

    def work() -> None:
        step(learner, batch)

    for _ in range(num_warmup):
        work()
    # Of the step before, which is freed at the beginning of each step.
    learner.optimizer.zero_grad()
    return call_cost(work, held=_held(learner, batch), device=batch.targets.device, num_repeats=num_repeats)


def call_cost(
    work: Callable[[], Any], *, held: Iterable[Tensor], device: torch.device, num_repeats: int = 3
) -> Cost:
    """Return the cost of `work()`, which is called 2 + `num_repeats` times, warm.

    Args:
        work: any computation; operations are those of its first call here, memory that of its second.
        held: the tensors that stay alive between calls.
        device: on which it computes.
        num_repeats: calls that are timed.
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats must be at least 1, got {num_repeats}: a time needs a call")
    with FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) as counter:
        work()
    kept = _num_bytes(held)
    with _memory_rise(device) as rise:
        work()
    times = [_seconds(work, device) for _ in range(num_repeats)]
    return Cost(
        flops=int(counter.get_total_flops()),
        peak_bytes=kept + rise(),
        all_seconds=tuple(seconds for seconds, _ in times),
        wall_seconds=min(wall for _, wall in times),
    )


def _seconds(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return seconds as in `Cost` and elapsed ones."""
    own, elapsed = work_clock(device), wall_clock(device)
    starts = own(), elapsed()
    work()
    return own() - starts[0], elapsed() - starts[1]


# Operations


def _product_with_vector(matrix: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(matrix)


def _added_product_with_vector(_: torch.Size, matrix: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * prod(matrix)


def _added_outer_product(_: torch.Size, left: torch.Size, right: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * prod(left) * prod(right)


def _added_product(_: torch.Size, left: torch.Size, right: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * prod(left) * right[-1]


# PyTorch's counter knows products of matrices alone, and only out of place.
_MORE_PRODUCTS: dict[Any, Any] = {
    torch.ops.aten.mv: _product_with_vector,
    torch.ops.aten.dot: _product_with_vector,
    torch.ops.aten.addmv: _added_product_with_vector,
    torch.ops.aten.addmv_: _added_product_with_vector,
    torch.ops.aten.addr: _added_outer_product,
    torch.ops.aten.addr_: _added_outer_product,
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten.baddbmm_: _added_product,
}


# Memory


def _held(learner: Learner, batch: TrainingBatch) -> Iterator[Tensor]:
    """Yield what stays between steps: parameters and buffers, the optimizer's state, the batch."""
    yield from chain(learner.model.parameters(), learner.model.buffers())
    if isinstance(learner.loss.loss, nn.Module):
        yield from learner.loss.loss.buffers()
    # Of an optimizer that is made of others, too, whose own state is empty.
    yield from (value for value in tree_leaves(learner.optimizer.state_dict()) if isinstance(value, Tensor))
    yield from [batch.inputs] if isinstance(batch.inputs, Tensor) else batch.inputs.values()
    yield from (tensor for tensor in (batch.targets, batch.weights) if tensor is not None)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def _memory_rise(device: torch.device) -> Iterator[Callable[[], int]]:
    """Give a function that returns by how many bytes the memory in use rose at most, inside."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: int(torch.cuda.max_memory_allocated(device)) - before
        return
    with _LiveStorages() as live:
        yield lambda: live.peak


class _LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive; their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._total = 0
        self._sizes: dict[int, int] = {}  # address -> bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given and address not in self._sizes:
                self._sizes[address] = size
                self._total += size
                self.peak = max(self.peak, self._total)
                weakref.finalize(storage, self._freed, address)  # PyTorch keeps this object as long as the memory
        return result

    def _freed(self, address: int) -> None:
        self._total -= self._sizes.pop(address)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
