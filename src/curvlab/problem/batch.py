"""One batch of examples: inputs (a tensor or a mapping of tensors) and targets, with one row for each example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Batch: TypeAlias = tuple[Inputs, Tensor]
# A data set of (input, target), or two tensors of all of them.
Pairs: TypeAlias = Dataset[Any] | tuple[Tensor, Tensor]


def num_examples(inputs: Inputs) -> int:
    """Return how many examples a batch holds."""
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def weighted(values: Tensor, weights: Tensor | None, outputs: Tensor | None = None) -> Tensor:
    """Return w_n times what belongs to example n: values (N, ...), or (K, N, ...) beside outputs (N, ...)."""
    ndim = values.ndim if outputs is None else outputs.ndim
    return values if weights is None else values * weights.to(values).reshape(-1, *[1] * (ndim - 1))


def is_pair(data: Any) -> bool:
    """Return whether `data` is (inputs, targets) already, and not a sequence of two batches."""
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], Tensor | Mapping)
        and isinstance(data[1], Tensor)
    )


def checked_batch(batch: Any) -> Batch:
    """Return a batch with class indices as int64, or raise an error that says what a batch is."""
    rows = (
        [*(batch[0].values() if isinstance(batch[0], Mapping) else [batch[0]]), batch[1]] if is_pair(batch) else []
    )
    if not rows or not all(isinstance(tensor, Tensor) and tensor.ndim > 0 for tensor in rows):
        raise TypeError(
            "each batch must be a pair (inputs, targets) of tensors with one row for each example, got "
            f"{_description(batch)}. For single examples pass a dataset or two stacked tensors, for NumPy arrays "
            "torch.from_numpy(...), for a Hugging Face model a mapping such as {'input_ids': ..., "
            "'attention_mask': ...} as the inputs, or alone with its 'labels' inside, for examples by number "
            "torch.utils.data.Subset(dataset, numbers)."
        )
    if any(tensor.layout != torch.strided for tensor in rows):
        raise ValueError("the data is sparse: pass inputs.to_dense()")
    if any(tensor.is_meta for tensor in rows):
        raise ValueError("the data is on the meta device, where tensors have shapes but no values: load it first")
    inputs, targets = batch
    lengths = {len(tensor) for tensor in rows[:-1]}
    if lengths != {len(targets)}:
        raise ValueError(f"inputs have {sorted(lengths)} examples and targets {len(targets)}: they must agree")
    # Losses index and compare: int32 and uint8 do neither as int64 does (uint8 wraps an ignore_index of -100).
    return inputs, targets if targets.is_floating_point() else targets.long()


def tensors_in(batch: tuple[Inputs, *tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the tensors of inputs, and those that stand beside them."""
    inputs, *others = batch
    return [inputs, *others] if isinstance(inputs, Tensor) else [*inputs.values(), *others]


def take(inputs: Inputs, rows: Any) -> Inputs:
    """Return some rows of the inputs, or one."""
    if isinstance(inputs, Mapping):
        return {name: value[rows] for name, value in inputs.items()}
    return inputs[rows]


def stacked(inputs: Sequence[Inputs]) -> Inputs:
    """Return single inputs as those of a batch."""
    first = inputs[0]
    if isinstance(first, Mapping):
        mappings = cast("Sequence[Mapping[str, Tensor]]", inputs)
        return {name: torch.stack([example[name] for example in mappings]) for name in first}
    return torch.stack(cast("list[Tensor]", list(inputs)))


def shapes(inputs: Inputs, target: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one example: those that agree fit into one batch."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return tuple(tuple(value.shape) for value in [*values, target])


def _description(batch: Any) -> str:
    if not isinstance(batch, tuple | list):
        return type(batch).__name__
    entries = [
        f"{type(entry).__name__} {tuple(entry.shape)}" if isinstance(entry, Tensor) else type(entry).__name__
        for entry in batch[:3]
    ]
    return f"{type(batch).__name__} of {len(batch)} ({', '.join(entries)}{', ...' if len(batch) > 3 else ''})"


def stack(dataset: Pairs | DataLoader[Any], indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples `indices` (repeats allowed) as (inputs, targets), (B, ...) each.

    In-memory sets (TensorDataset, pair of tensors) are indexed at once, others example by example; of a DataLoader
    the examples of its data set.
    """
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    chosen = torch.as_tensor(indices, dtype=torch.long)
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, tuple):
        if len(tensors) != 2:
            raise ValueError(f"the data set holds {len(tensors)} tensors, but two are needed: inputs, targets")
        inputs, targets = tensors
        return inputs[chosen], targets[chosen]
    with collating():
        batch = default_collate([dataset[index] for index in chosen.tolist()])
    return cast("tuple[Tensor, Tensor]", checked_batch(batch))


@contextmanager
def collating() -> Iterator[None]:
    """Say what to change where torch makes no batch of the examples."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        text = str(error)
        if "equal size" in text:
            raise different_shapes() from error
        if "batch must contain" not in text and "Could not infer dtype" not in text:
            raise
        raise TypeError(
            f"torch makes no batch of the data's examples ({text.strip().splitlines()[-1]}): inputs and targets "
            "are tensors, arrays or numbers. Turn images into tensors in the data set (transforms.ToTensor()), "
            "and give every example a target; where the loss needs none, 0."
        ) from error


def different_shapes() -> ValueError:
    """Return the error for examples that fit into no batch."""
    return ValueError(
        "examples of the data set differ in shape: pass a DataLoader with a collator that pads them, "
        "DataLoader(dataset, batch_size=..., collate_fn=DataCollatorWithPadding(tokenizer)), or pad them to one "
        "length, with ignored targets (ignore_index) and an attention_mask."
    )


# ------------------------------------------------------------------------ what does not fit a model
# Of what PyTorch says where inputs do not fit a layer.
_SHAPES = (
    "cannot be multiplied",
    "size mismatch",
    "xpected",
    "out of range",
    "must match",
    "invalid for input of",
)


def explain(model: nn.Module, inputs: Inputs, error: Exception) -> None:
    """Raise a forward's error about its inputs again, with what to pass; return where nothing is known."""
    if isinstance(error, TypeError):
        _explain_arguments(model, inputs, error)
    else:
        _refuse_not_functional(model, error)
        _explain_values(model, inputs, error)


def _explain_arguments(model: nn.Module, inputs: Inputs, error: Exception) -> None:
    if isinstance(model, nn.Sequential) and isinstance(inputs, Mapping) and len(inputs) > 1:
        raise TypeError(
            f"nn.Sequential hands all of {sorted(inputs)} to its first module, as one mapping ({error}): "
            "wrap it in a module whose forward takes them by name, or pass one tensor."
        ) from error
    if "argument" in str(error) and isinstance(inputs, Mapping) and not isinstance(model, nn.Sequential):
        raise TypeError(
            f"the forward of {type(model).__name__} does not fit the inputs {sorted(inputs)} ({error}): a "
            "mapping is handed over by name, so its names are the forward's arguments."
        ) from error
    if "argument" in str(error) and isinstance(inputs, Tensor) and "positional" in str(error):
        raise TypeError(
            f"the forward of {type(model).__name__} takes more than one input ({error}): pass a mapping by "
            "the names of its arguments, ({'u': u, 'v': v}, targets)."
        ) from error


def _explain_values(model: nn.Module, inputs: Inputs, error: Exception) -> None:
    values = tensors_in((inputs,))
    kinds = {str(v.dtype) for v in values if not v.is_floating_point()}
    if kinds and "type" in str(error):
        raise TypeError(
            f"the inputs are {', '.join(sorted(kinds))}, and the model does not take them ({error}): pass "
            "inputs.float() where they are numbers, inputs.long() where they are tokens."
        ) from error
    if "same dtype" in str(error):
        raise ValueError(
            f"the model mixes dtypes ({error}): convert all of it, frozen parts and buffers too, with "
            "model.float() or model.double()."
        ) from error
    if not isinstance(error, NotImplementedError) and any(text in str(error) for text in _SHAPES):
        found = ", ".join(map(_described, values))
        raise ValueError(
            f"{type(model).__name__} does not take the inputs, {found} ({error}): pass them as model(inputs) "
            "takes a batch, its first axis the examples."
        ) from error


def _refuse_not_functional(model: nn.Module, error: Exception) -> None:
    """Raise again what torch.func says of a forward that it cannot differentiate."""
    for text, why in (
        ("saved tensor hooks", "checkpoints activations: turn that off, model.gradient_checkpointing_disable()"),
        ("setup_context", "has an autograd.Function of its own: give it setup_context and jvp"),
        ("mutate a captured Tensor", "writes into a tensor of its own, a buffer that counts say: leave that out"),
        ("doesn't have storage", "packs sequences, or reads numbers out of tensors: pass them padded, not packed"),
    ):
        if text in str(error):
            raise NotImplementedError(f"{type(model).__name__} {why} ({error})") from error


def _described(tensor: Tensor) -> str:
    ids = not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel() > 0
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" from {tensor.min()} to {tensor.max()}" if ids else "")
