"""How many examples and vectors a pass takes at once: from a budget of memory, and fewer when memory runs out."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from curvlab.problem.batch import Inputs, take
from curvlab.problem.model_function import ModelFunction

# Without a budget, a pass may fill this share of what is free. It only ever lowers the default number of examples.
SHARE_OF_FREE = 0.8
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")
_NOTHING_LEFT = (
    "One example and one vector at a time do not fit: with low_memory=True a Gauss-Newton product holds what a "
    "gradient step holds; else shorter sequences, lower precision, or fewer trainable parameters."
)
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

Value = TypeVar("Value")
# Inputs, targets, and perhaps weights.
AnyBatch = TypeVar("AnyBatch", bound=tuple[Any, ...])


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
class Memory:
    """Examples and vectors at a time; a problem, its samples and its operators share one, so that they learn once.

    Attributes:
        examples: at most so many in a pass; None: batches as they come.
        columns: at most so many vectors together.
        budget: in bytes; None: a share of what is free.
        estimates: whether passes are estimated beforehand: not where the user chose their size and gave no budget.
        current: examples in the pass that is under way.
    """

    examples: int | None = None
    columns: int = 2**31
    budget: float | None = None
    estimates: bool = True
    current: int = 1

    def __post_init__(self) -> None:
        budget = self.budget
        if budget is not None and (not isinstance(budget, int | float) or not budget >= 1):
            raise ValueError(f"memory_budget is in bytes, at least 1, got {budget!r}: 2e9 for 2 GB")

    def examples_at_once(self, count: int, at_most: int | None = None) -> int:
        """Return how many of `count` examples the next pass takes."""
        self.current = min(count, at_most or count, self.examples or count)
        return self.current

    def pieces(self, batch: AnyBatch, at_most: int | None = None) -> list[AnyBatch]:
        """Cut a batch into passes, views of it."""
        count = len(batch[1])  # targets
        size = self.examples_at_once(count, at_most)
        if size >= count:
            return [batch]
        return [rows_of(batch, slice(start, start + size)) for start in range(0, count, size)]

    def fit(self, estimate: Estimate, *, examples: int, columns: int, device: torch.device) -> None:
        """Lower the numbers, with a MemoryWarning, until the estimate for so many fits into the budget."""
        wanted = (min(self.examples or examples, examples), min(self.columns, columns))
        if wanted[0] <= estimate.fitting[0] and wanted[1] <= estimate.fitting[1]:
            return
        budget = self.budget or share_of_free(device)
        fitting = wanted
        while estimate.needed(*fitting) > budget and fitting != (1, 1):
            fitting = _halved(*fitting)
        estimate.fitting = fitting
        if fitting == wanted:
            return
        self._lower(fitting, wanted)
        warnings.warn(
            f"{wanted[0]} examples and {wanted[1]} vectors at a time would take about "
            f"{estimate.needed(*wanted) / 2**20:.3g} MiB, more than the {budget / 2**20:.3g} MiB that "
            f"{'are given' if self.budget else 'may be used'}: a pass takes {fitting[0]} examples and "
            f"{fitting[1]} vectors.",
            MemoryWarning,
            stacklevel=2,
        )

    def run(
        self, compute: Callable[[], Value], *, columns: int = 1, told: Callable[[int], str] | None = None
    ) -> Value:
        """Return what `compute` returns; each time that memory runs out, halve the larger number and start again.

        Args:
            compute: reads the numbers from here.
            columns: how many vectors there are.
            told: what the warning says of so many at a time; None: that a pass takes so many examples. With it the
                allocator's error gets no note on what to pass.

        Raises:
            the allocator's own error, where one example and one vector do not fit.
        """
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = (self.current, min(self.columns, columns))
                if failed == (1, 1):
                    if told is None:
                        error.add_note(_NOTHING_LEFT)
                    raise
            # Here the error is gone, and with it the frames that held the failed pass.
            smaller = _halved(*failed)
            self._lower(smaller, failed)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            text = (
                f"a pass now takes {smaller[0]} examples and {smaller[1]} vectors at a time, and this one starts "
                "again. Pass batch_size or memory_budget to begin with less."
            )
            text = text if told is None else told(smaller[0])
            warnings.warn(f"memory ran out: {text}", MemoryWarning, stacklevel=2)

    def _lower(self, to: tuple[int, int], of: tuple[int, int]) -> None:
        """Take over what is lower than it was: that one vector did not ask for more says nothing of many."""
        self.examples = to[0] if to[0] < of[0] else self.examples
        self.columns = to[1] if to[1] < of[1] else self.columns


def with_halving(compute: Callable[[int], Value], size: int, told: Callable[[int], str] | None = None) -> Value:
    """Return compute(size), half as many at a time whenever memory runs out; `told`: see `Memory.run`."""
    memory = Memory(size)
    return memory.run(lambda: compute(memory.examples_at_once(size)), told=told)


def rows_of(batch: AnyBatch, rows: slice) -> AnyBatch:
    """Return some examples of a batch: its inputs, and what else has a row for each."""
    inputs, *others = batch
    cut = (take(inputs, rows), *(other if other is None else other[rows] for other in others))
    return cast("AnyBatch", cut)


def _halved(examples: int, columns: int) -> tuple[int, int]:
    """Halve the larger of the two."""
    return (-(-examples // 2), columns) if examples >= columns else (examples, -(-columns // 2))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator of the GPU or the CPU, or Python itself, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


# ------------------------------------------------------------------------------------- what is free
def share_of_free(device: torch.device) -> float:
    """Return the budget where none is given; infinite where nobody tells how much is free."""
    free = free_memory(device)
    return float("inf") if free is None else SHARE_OF_FREE * free


def free_memory(device: torch.device) -> int | None:
    """Return bytes that this process may still take on the device, or on the machine; None where nobody tells.

    On a CPU the least of what the machine has available, what its control groups leave it (a container, a job of
    Slurm), what Slurm's own variables do, and `ulimit -v`: beyond all but the last the process is killed, and
    nothing is halved.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    least = min([*_available(), *_left_by_slurm(), *_left_by_address_space()], default=None)
    for folder, (limit, used, files) in _control_groups("\n".join(_lines(_PROC / "self" / "cgroup")), _CGROUPS):
        most = next(iter(_lines(folder / limit)), "")
        taken = next(iter(_lines(folder / used)), "") if most.isdigit() else ""
        if taken.isdigit() and (least is None or int(most) - int(taken) < least):
            # Files that were read and may be dropped count as used; the kernel drops them before it kills.
            counts = [line.split() for line in _lines(folder / "memory.stat")]
            left = int(most) - int(taken) + sum(int(size) for name, size in counts if name == files)
            least = left if least is None else min(least, left)
    return least


def _available() -> Iterator[int]:
    """Yield the machine's MemAvailable."""
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable"):
            yield int(line.split()[1]) * 1024


@lru_cache(maxsize=4)
def _control_groups(own: str, mounted: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of a process's memory groups, innermost first, and what they call limit, use and files.

    Args:
        own: /proc/self/cgroup.
        mounted: where version 2 lies, and version 1 in `memory`.
    """
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.strip("/")
        folders = (group, *(parent for parent in group.parents if parent.is_relative_to(root)))
        found += [(folder, names) for folder in folders]
    return found


def _left_by_slurm() -> Iterator[int]:
    """Yield what a job's memory on this node, in MB, leaves beside this process; some clusters have no groups."""
    given = {name: os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")}
    sizes = [int(text) if text.isdigit() else 0 for text in given.values()]
    if most := sizes[0] or sizes[1] * sizes[2]:  # --mem=0, all of the node, is no limit
        pages = sum(int(line.split()[1]) for line in _lines(_PROC / "self" / "statm"))
        yield most * 2**20 - pages * os.sysconf("SC_PAGE_SIZE")


def _left_by_address_space() -> Iterator[int]:
    """Yield what RLIMIT_AS leaves; nothing where it is not set, or not known (Windows)."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    for line in _lines(_PROC / "self" / "statm") if limit != resource.RLIM_INFINITY else ():
        yield limit - int(line.split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _lines(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:  # Path.read_text takes half as long again
            return file.read().splitlines()
    except OSError:
        return []


# -------------------------------------------------------------------------------- what a pass takes
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
