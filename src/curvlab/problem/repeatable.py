"""Data or outputs that are others at each pass are refused: each product would belong to another matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.problem.batch import Batch, take
from curvlab.problem.model_function import ModelFunction

EACH_PASS = "each pass, so each product would belong to another matrix"
_EXAMPLES_READ = 2
# Read where random numbers are drawn and nothing differs yet: a coin that flips an image does so half of the time.
_EXAMPLES_READ_IN_DOUBT = 32


def check_examples(read: Callable[[int], Any], indices: Sequence[int]) -> None:
    """Raise a ValueError if reading the same examples twice gives different values."""
    with unchanged_random_state():
        for number in (_EXAMPLES_READ, _EXAMPLES_READ_IN_DOUBT):
            before = _random_states()
            for index in list(indices[:: max(1, len(indices) // number)])[:number]:
                if not _same(read(index), read(index)):
                    raise ValueError(
                        f"example {index} is another one each time it is read (a random augmentation, or a "
                        f"collator that draws masks), so each product would belong to another matrix: pass the "
                        "data without it, or draw once with list(DataLoader(...)), a list of batches."
                    )
            if _same(before, _random_states()):
                return


def check_passes(batches: Iterable[Any]) -> None:
    """Raise a ValueError if two passes begin with different batches. Cost: two batches."""
    try:
        with unchanged_random_state():
            first, second = (next(iter(batches), None) for _ in range(2))
    except Exception as error:
        error.add_note(f"raised by the data itself, {type(batches).__name__}, when its first batch was read")
        raise
    if first is not None and second is None:
        raise ValueError(
            "a second pass over the data is empty, and products take many: pass list(data), a list of batches."
        )
    if not _same(first, second):
        raise ValueError(
            f"two passes over the data begin with different batches: it is random, another at {EACH_PASS}. Read "
            "it once with list(data), a list of batches, or pass a data set without randomness."
        )


@torch.inference_mode(False)
@torch.no_grad()
def check_examples_apart(
    function: ModelFunction, select: Callable[[Tensor], list[Batch]], num_examples: int
) -> None:
    """Raise a ValueError if an example has other outputs beside another one, by more than 1 %, 9 % in bfloat16.

    Or if its outputs have no derivative by the parameters.

    Where the outputs cannot be had, nothing is raised: the first pass over the data tells why, with its own error.
    Cost: a forward of 3 examples.
    """
    try:
        (inputs, _), *_ = select(torch.arange(min(2, num_examples)))
        both = function(function.parameters, take(inputs, slice(0, 2)))
        with torch.enable_grad():
            one = function([p.requires_grad_() for p in function.parameters], take(inputs, slice(0, 1)))
        largest = max(0.01, torch.finfo(both.dtype).eps ** 0.5) * both.norm()  # other kernels round otherwise
        apart = one.shape != both[:1].shape or not (one - both[:1]).norm() > largest
    except Exception:  # see above
        return
    check_differentiable(one)
    if not apart:
        raise ValueError(
            "the model's outputs of an example change with the other examples of its batch, or from call to call, "
            "so it has no gradients of single examples: take means and scales that are fixed."
        )


def check_differentiable(outputs: Tensor) -> Tensor:
    """Return outputs that were computed with gradients, or raise a ValueError where they have none."""
    if not outputs.requires_grad:
        raise ValueError(
            "the model's outputs do not follow from its trainable parameters (no_grad or detach in its "
            "forward): every derivative would be zero. Leave that out."
        )
    return outputs


def _same(first: Any, second: Any) -> bool:
    """Return whether two batches, or examples, hold the same values; things that cannot be compared do."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float | int | str | bytes | None | np.generic):
        return repr(first) == repr(second)  # nan is unlike itself
    return True


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Put the global generators of Python, NumPy and PyTorch back as they were."""
    of_torch, of_numpy, of_python = _random_states()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002  # what data sets draw from
        random.setstate(of_python)


def _random_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
