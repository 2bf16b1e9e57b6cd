"""A task's network and data by their sizes alone: built on the meta device, nothing is loaded or computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.curvature.token_chunks import FEWER_LOGITS, LOGITS_PER_CHUNK
from curvlab.lab.models.causal_language_model import DTYPES
from curvlab.problem import freeze
from curvlab.problem.batch import Inputs
from curvlab.problem.memory import activation_bytes
from curvlab.problem.model_function import ModelFunction

# Data that a plan does not read: (shape of an input, outputs, training examples), as published.
DATA: dict[str, tuple[tuple[int, ...], int, int]] = {
    "imagenet": ((3, 224, 224), 1000, 1_281_167),
    "mnist": ((1, 28, 28), 10, 60_000),
    "fashion_mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "cifar100": ((3, 32, 32), 100, 50_000),
}
# Models of the hub: (class of transformers, its config where it differs from the class's defaults).
PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    "facebook/opt-1.3b": (
        "OPT",
        {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32}
        | {"vocab_size": 50272, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048},
    ),
    "huggyllama/llama-7b": ("Llama", {"vocab_size": 32000}),
    "mistralai/Mistral-7B-v0.1": ("Mistral", {"vocab_size": 32000}),
}


class UnplannableError(Exception):
    """What cannot be known before it is computed; the text says why."""


@dataclass(frozen=True)
class Sizes:
    """A network and the data that its matrix is the mean over.

    Attributes:
        num_parameters: P, those that require gradients.
        total_parameters: frozen ones too.
        num_tensors: L, how many tensors the P are in.
        itemsize: bytes of a number.
        num_examples: N; None where it follows from data that a plan does not read.
        flops: of one example's forward.
        activations: bytes that a recorded forward of one example keeps, by plain attention.
        fused_activations: the same by the model's own attention, for products with low_memory.
        is_language: whether logits are taken token by token.
        dtype: of parameters.
        input_shape: of one example.
        num_outputs: classes, or the vocabulary.
        build: the network with random weights, on the CPU.
    """

    num_parameters: int
    total_parameters: int
    num_tensors: int
    itemsize: int
    num_examples: int | None
    flops: int
    activations: int
    fused_activations: int
    is_language: bool
    dtype: torch.dtype
    input_shape: tuple[int, ...]
    num_outputs: int
    build: Any

    def peak_bytes(self, batch_size: int, *, low_memory: bool = False) -> float:
        """Return bytes of one product with one vector: parameters, the vector, the product, a gradient, a batch.

        As `DataOperator` estimates them: 2.65 recorded forwards, 1.3 with low_memory, and 5 chunks of logits.
        """
        vectors = 2 * self.num_parameters + self.num_parameters  # v, G v, and the gradient before it is added
        recorded = 1.3 * self.fused_activations if low_memory else 2.65 * self.activations
        logits = 5 * (FEWER_LOGITS if low_memory else LOGITS_PER_CHUNK) if self.is_language else 0
        return self.itemsize * (self.total_parameters + vectors + logits) + batch_size * recorded


def sizes_of(settings: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a task as conf/task describes it; an UnplannableError says what is not known."""
    if settings.get("model") is None or settings.get("data") is None:
        raise UnplannableError("its config names no data and model of a task")
    shape, outputs, count = _language(settings) if "tokenizer" in settings else _data(settings["data"])
    count = settings["curvature_train"] if settings.get("curvature_train") else count
    dtype = DTYPES.get(str(settings["model"].get("dtype") or settings.get("dtype")), torch.float32)
    build = partial(_build, dict(settings["model"]), shape, outputs, dtype)
    with torch.device("meta"):
        model = build()
    freezing = settings.get("freeze") or {"normalization": False, "biases": False}
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = freeze(model, normalization=freezing["normalization"], biases=freezing["biases"])
    return _measured(model, shape, outputs, count, trained, total, build, "tokenizer" in settings)


def _measured(  # noqa: PLR0917
    model: nn.Module,
    shape: tuple[int, ...],
    outputs: int,
    count: int | None,
    trained: int,
    total: int,
    build: Any,
    tokens: bool,
) -> Sizes:
    function = ModelFunction(model)
    first = example(shape, outputs, 1, function.dtype, tokens, device="meta")[0]
    one: Inputs = first
    is_language = tokens and _head(model)
    if tokens:  # with a mask, transformers need not look at values, which do not exist here
        one = {"input_ids": first, "attention_mask": torch.ones_like(first)}
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        function(function.parameters, one)
    activations, fused = (activation_bytes(function, one, fused=own, to_head=is_language) for own in (False, True))
    return Sizes(
        num_parameters=trained,
        total_parameters=total,
        num_tensors=sum(parameter.requires_grad for parameter in model.parameters()),
        itemsize=function.dtype.itemsize,
        num_examples=count,
        flops=counter.get_total_flops(),
        activations=activations,
        fused_activations=fused,
        is_language=is_language,
        dtype=function.dtype,
        input_shape=shape,
        num_outputs=outputs,
        build=build,
    )


def example(
    shape: tuple[int, ...], num_outputs: int, count: int, dtype: torch.dtype, tokens: bool, *, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return random inputs of a task, pixels or tokens, and a class for each, or for each token."""
    if tokens:
        ids = torch.randint(num_outputs, (count, *shape), device=device)
        return ids, ids
    return torch.randn(count, *shape, dtype=dtype, device=device), torch.randint(
        num_outputs, (count,), device=device
    )


def _build(node: dict[str, Any], shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> nn.Module:
    name = node.get("name")
    if name is not None:
        import transformers

        if name not in PUBLISHED:
            raise UnplannableError(f"the sizes of {name} are not known without loading it")
        family, config = PUBLISHED[name]
        settings = getattr(transformers, f"{family}Config")(**config, attn_implementation=node["attention"])
        return getattr(transformers, f"{family}ForCausalLM")(settings).to(dtype).eval()
    if "weights" in node:
        node = node | {"weights": None}
    model: nn.Module = instantiate(node, input_shape=shape, num_outputs=outputs)
    return model.to(dtype).eval()


def _data(node: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int]:
    name = str(node.get("name") or str(node["_target_"]).rpartition(".load_")[2])
    if name in DATA:
        shape, outputs, count = DATA[name]
        return shape, outputs, min(count, node.get("num_train") or count)
    try:
        splits = instantiate(node)
        return tuple(splits.input_shape), splits.num_outputs, len(splits.train)
    except Exception as error:  # whatever a loader finds missing
        raise UnplannableError(f"its data cannot be read ({str(error).splitlines()[0][:80]})") from error


def _language(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int | None]:
    length = settings.get("sequence_length")
    if isinstance(length, Mapping) or length is None:
        raise UnplannableError("its sequences have no single length")
    pretrained = settings["tokenizer"].get("pretrained")
    if pretrained is None:
        return (int(length),), int(settings["tokenizer"]["vocabulary_size"]), None
    if pretrained not in PUBLISHED:
        raise UnplannableError(f"the sizes of {pretrained} are not known without loading it")
    return (int(length),), PUBLISHED[pretrained][1]["vocab_size"], None


def _head(model: nn.Module) -> bool:
    get_head = getattr(model, "get_output_embeddings", None)
    return callable(get_head) and type(get_head()) is nn.Linear


def in_bytes(number: float) -> str:
    """Return 5.2 GB."""
    if number <= 0:
        return "0 B"
    power = min(4, int(math.log(number, 1000)))
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def examples_of_a_pass(sizes: Sizes) -> int:
    """Return how many examples the targets take at a time."""
    size = 16 if sizes.is_language else 512
    return min(size, sizes.num_examples or size)
