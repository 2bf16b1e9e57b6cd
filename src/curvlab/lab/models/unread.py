"""A task's network before its data are read: on the meta device, so that neither costs anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from curvlab.lab.models.language_models import DTYPES

# Shape of an image and number of classes, as published: they are not read for it.
_IMAGES = {
    "imagenet": ((3, 224, 224), 1000),
    **dict.fromkeys(("mnist", "fashion_mnist"), ((1, 28, 28), 10)),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
}
_TABLES = dict.fromkeys(("concrete", "energy"), ((8,), 1))  # columns and outputs of the UCI's
# Models of the hub: their kind in transformers, and what differs from the defaults of its config.
_OPT = {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32}
_HUB: dict[str, dict[str, Any]] = {
    "facebook/opt-1.3b": {"model_type": "opt", **_OPT, "word_embed_proj_dim": 2048},
    "google-t5/t5-small": {"model_type": "t5"},
    "huggyllama/llama-7b": {"model_type": "llama"},
    "mistralai/Mistral-7B-v0.1": {"model_type": "mistral"},
}


def network(settings: Mapping[str, Any]) -> nn.Module:
    """Return the network of a task on the meta device, where it takes no memory."""
    node = dict(settings["model"])
    dtype = DTYPES.get(str(node.get("dtype") or settings.get("dtype")), torch.float32)
    if (name := node.get("name")) is not None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        if name not in _HUB:
            raise LookupError(f"the sizes of {name} are not known without loading it")
        with torch.device("meta"):
            family = AutoModelForSeq2SeqLM if "source_length" in settings else AutoModelForCausalLM
            return family.from_config(AutoConfig.for_model(**_HUB[name]), dtype=dtype)
    if "weights" in node:
        node["weights"] = None
    shape, outputs = shapes(settings)
    marks = {"padding": 0, "end": 1} if "source_length" in settings else {}  # the tokenizer's, of no size
    with torch.device("meta"):
        model: nn.Module = instantiate(node, input_shape=shape, num_outputs=outputs, **marks)
    return model.to(dtype)


def shapes(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the shape of an input, and the number of outputs."""
    if "tokenizer" in settings:
        if "source_length" in settings:
            lengths = int(settings["source_length"]), int(settings["target_length"])
            return lengths, int(settings["tokenizer"]["vocabulary_size"])
        length = settings["sequence_length"]
        longest = length if isinstance(length, int) else max(length.values())
        return (longest,), int(settings["tokenizer"]["vocabulary_size"])
    known = published_images(settings["data"]) or _TABLES.get(_name(settings["data"]))
    if known is not None:
        return known
    splits = instantiate(settings["data"])
    return tuple(splits.input_shape), splits.num_outputs


def published_images(data: Mapping[str, Any]) -> tuple[tuple[int, ...], int] | None:
    """Return shape and number of classes of a published data set of images, which need not be read for them."""
    return _IMAGES.get(_name(data))


def _name(data: Mapping[str, Any]) -> str:
    return str(data.get("name") or str(data["_target_"]).rpartition(".load_")[2])
