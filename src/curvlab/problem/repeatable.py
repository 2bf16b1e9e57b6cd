"""Data that gives the same examples at every pass: a product is that of a matrix only then."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler

_WHY = "so each product would belong to another matrix"
# How often a sampler is asked for its order: a short one may give the same by chance.
_DRAWS, _DRAWS_OF_SHORT, _SHORT = 2, 10, 10
_EXAMPLES_READ = 2
# Read where random numbers are drawn and nothing differs yet: a coin that flips an image does so half of the time.
_EXAMPLES_READ_IN_DOUBT = 32
_SCALARS = (float, int, str, bytes, type(None), np.generic)


@dataclass(frozen=True)
class FixedLoader:
    """A loader whose passes are all alike.

    Attributes:
        loader: gives the same batches at each pass.
        indices: of the examples of its data set, in that order; None for streams, and data sets of whole batches.
    """

    loader: DataLoader[Any]
    indices: Sequence[int] | None


def fixed_loader(loader: DataLoader[Any]) -> FixedLoader:
    """Return a loader that is read in one order for good, or raise a ValueError that says how to fix the data.

    - One whose samplers repeat themselves is taken as it is.
    - One that shuffles is read in the order of its data set, in batches of the same size: the same matrix. Where
      it also drops its last batch, other examples would be missing at each pass: all of them are read, and a
      warning says so.
    - Samplers that choose other examples at each pass, batch samplers that group them anew, and data that is
      random itself (augmentation, masks drawn by a collator) are refused.

    The state of all random generators is as before. Cost: the orders of two passes, and some examples read twice;
    with worker processes the first batch.
    """
    with unchanged_random_state(*_generators(loader)):
        found = _ordered(loader)
        if found.indices is None or loader.num_workers > 0:
            check_stream(found.loader)
        else:
            check_examples(lambda rows: loader.collate_fn(fetch(loader.dataset, rows)), found.indices)
    return found


def check_examples(read: Callable[[list[int]], Any], indices: Sequence[int]) -> None:
    """Raise a ValueError if reading the same examples twice gives different values.

    Args:
        read: a batch of the examples at given indices.
        indices: of all examples.
    """
    with unchanged_random_state():
        for number in (_EXAMPLES_READ, _EXAMPLES_READ_IN_DOUBT):
            spread = range(0, len(indices), max(1, len(indices) // number))
            before = _random_states()
            for index in list(spread)[:number]:
                if not same(read([indices[index]]), read([indices[index]])):
                    raise ValueError(
                        f"example {indices[index]} is another one each time it is read (a random augmentation, or "
                        f"a collator that draws masks), {_WHY}: pass the data without it, or draw once with "
                        "list(DataLoader(...)), a list of batches."
                    )
            if same(before, _random_states()):
                return


def check_stream(batches: Iterable[Any]) -> None:
    """Raise a ValueError if two passes begin with different batches. Cost: two batches."""
    with unchanged_random_state():
        first, second = (next(iter(batches), None) for _ in range(2))
    if first is not None and second is None:
        raise ValueError(
            "a second pass over the data is empty, and products take many: pass list(data), a list of batches."
        )
    if not same(first, second):
        raise ValueError(
            f"two passes over the data begin with different batches (it shuffles, or is random), {_WHY}: "
            "read it once with list(data), a list of batches, or pass a data set without randomness."
        )


def fetch(dataset: Any, indices: list[int]) -> Any:
    """Return single examples as PyTorch's loaders read them."""
    together = getattr(dataset, "__getitems__", None)
    return together(indices) if callable(together) else [dataset[index] for index in indices]


def _ordered(loader: DataLoader[Any]) -> FixedLoader:
    if isinstance(loader.dataset, IterableDataset):
        return FixedLoader(loader, None)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        grouped = _orders(loader.batch_sampler)
        if any(other != grouped[0] for other in grouped[1:]):
            raise ValueError(
                f"the loader's batch_sampler ({type(loader.batch_sampler).__name__}) makes other batches at each "
                f"pass, {_WHY}: draw them once, DataLoader(dataset, batch_sampler=list(loader.batch_sampler), "
                "collate_fn=loader.collate_fn)."
            )
        return FixedLoader(loader, [index for batch in grouped[0] for index in batch])
    order, shuffled = _order(loader)
    drop = loader.batch_size is not None and loader.drop_last and len(order) % loader.batch_size > 0
    if not shuffled:
        kept = len(order) - len(order) % loader.batch_size if drop and loader.batch_size else len(order)
        return FixedLoader(loader, order[:kept] if loader.batch_size is not None else None)
    if drop and loader.batch_size is not None:
        warnings.warn(
            f"the loader shuffles and drops its last batch: {len(order) % loader.batch_size} of {len(order)} "
            f"examples, others at each pass, would be missing, {_WHY}. All of them are read, in the order of the "
            "data set. With shuffle=False the same are dropped each time, with drop_last=False none.",
            stacklevel=2,
        )
    return FixedLoader(_in_order(loader, order), order if loader.batch_size is not None else None)


def _order(loader: DataLoader[Any]) -> tuple[Sequence[int], bool]:
    """Return the indices of a pass, and whether their order is another at each; then they are sorted."""
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return range(len(sampler)), False
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return range(len(sampler.data_source)), True
    if type(sampler) is SubsetRandomSampler:
        return sorted(int(index) for index in sampler.indices), True
    orders = _orders(sampler)
    if all(other == orders[0] for other in orders[1:]):
        return orders[0], False
    if all(sorted(other) == sorted(orders[0]) for other in orders[1:]):
        return sorted(orders[0]), True
    raise ValueError(
        f"the loader's sampler ({type(sampler).__name__}) chooses other examples at each pass, {_WHY}: draw them "
        "once, DataLoader(dataset, batch_size=..., sampler=list(loader.sampler)), or pass the data set."
    )


def _orders(sampler: Iterable[Any]) -> list[list[Any]]:
    orders = [_plain(sampler)]
    draws = _DRAWS if len(orders[0]) > _SHORT else _DRAWS_OF_SHORT
    while len(orders) < draws and orders[-1] == orders[0]:
        orders.append(_plain(sampler))
    return orders


def _plain(sampler: Iterable[Any]) -> list[Any]:
    """Return what a sampler gives with tensors as numbers, and batches as lists."""

    def plain(index: Any) -> Any:
        if isinstance(index, Tensor | np.ndarray):
            return index.tolist()
        return list(index) if isinstance(index, list | tuple) else index

    return [plain(index) for index in sampler]


def _in_order(loader: DataLoader[Any], order: Sequence[int]) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=torch.Generator(),  # so that a pass does not draw from the global one
    )


def same(first: Any, second: Any) -> bool:
    """Return whether two batches, or examples, hold the same values; things that cannot be compared do."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, _SCALARS) and isinstance(second, _SCALARS):
        return repr(first) == repr(second)  # nan is unlike itself
    return True


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    inner = getattr(loader.batch_sampler, "sampler", None)
    owners = (loader, loader.sampler, loader.batch_sampler, inner)
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def unchanged_random_state(*generators: torch.Generator) -> Iterator[None]:
    """Put the global generators of Python, NumPy and PyTorch, and those given, back as they were."""
    states = [generator.get_state() for generator in generators]
    of_torch, of_numpy, of_python = _random_states()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002  # what data sets draw from
        random.setstate(of_python)


def _random_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
