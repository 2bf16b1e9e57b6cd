"""plan=true, a dry run: the sizes of a target's networks, what its published runs took, and what is stored.

Networks are built on the meta device, so that a size costs nothing. The time of a preset that was never published
follows from nothing that a config says: how many products a solver takes depends on what it finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.lab.models.language_models import DTYPES
from curvlab.lab.runs.run import Run
from curvlab.lab.runs.store import Store
from curvlab.lab.targets.settings import plain_task_settings
from curvlab.lab.targets.target import PRESETS, ROOT, Target
from curvlab.problem import freeze

# Data that a plan does not read, as published: shape of an input, and outputs.
_IMAGES: dict[str, tuple[tuple[int, ...], int]] = {
    "imagenet": ((3, 224, 224), 1000),
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
}
# Models of the hub: the class of transformers, and its config where that differs from the class's defaults.
_HUB: dict[str, tuple[str, dict[str, int]]] = {
    "facebook/opt-1.3b": (
        "OPT",
        {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32}
        | {"vocab_size": 50272, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048},
    ),
    "huggyllama/llama-7b": ("Llama", {"vocab_size": 32000}),
    "mistralai/Mistral-7B-v0.1": ("Mistral", {"vocab_size": 32000}),
}
_VECTORS = 3  # beside the parameters of a product: v, G v, and the gradient of one batch
_GPU = 80e9


def plan(target: Target, cfg: DictConfig) -> Iterator[str]:
    """Yield the lines of a plan."""
    yield f"{target.make_name} ({cfg.preset}): a plan; nothing is computed"
    for name, settings in plain_task_settings(cfg).items():
        yield f"{name}: {sizes(settings)}"
    yield from _published(target, str(cfg.preset))
    yield from stored_units(target, cfg)


# ------------------------------------------------------------------------------------ sizes
def sizes(settings: Mapping[str, Any]) -> str:
    """Return parameters and bytes of a task's network, or why they are not known before its data are read."""
    if settings.get("model") is None or settings.get("data") is None:
        return "not planned: its config names no data and model of a task"
    try:
        with torch.device("meta"):
            model = _network(settings)
    except Exception as error:  # whatever a loader finds missing
        return f"not planned: its network cannot be built ({str(error).partition(chr(10))[0][:80]})"
    total = sum(parameter.numel() for parameter in model.parameters())
    freezing = settings.get("freeze") or {"normalization": False, "biases": False}
    trained = freeze(model, normalization=freezing["normalization"], biases=freezing["biases"])
    itemsize = next(model.parameters()).dtype.itemsize
    least = itemsize * (total + _VECTORS * trained)
    frozen = f" and {total - trained:,} frozen" if total > trained else ""
    machine = "one GPU" if least <= _GPU else f"{math.ceil(least / _GPU)} GPUs"
    return (
        f"{trained:,} parameters{frozen}, {in_bytes(itemsize * total)}; a product of one vector holds "
        f"{in_bytes(least)} and what a forward keeps: {machine} of 80 GB"
    )


def work(settings: Mapping[str, Any]) -> float:
    """Return the operations of a task's network on its training set, to compare tasks with; nothing is read.

    Where that cannot be counted it is infinite; a data set that is none of `_IMAGES` and states no size is small.
    """
    try:
        with torch.device("meta"), FlopCounterMode(display=False) as counted:
            one = torch.zeros(1, *_shapes(settings)[0], dtype=torch.long if "tokenizer" in settings else None)
            _network(settings)(one)
    except Exception:  # as in `sizes`
        return math.inf
    data = settings["data"]
    return counted.get_total_flops() * float(
        data.get("num_train") or (60_000 if _name(data) in _IMAGES else 1_000)
    )


def _network(settings: Mapping[str, Any]) -> nn.Module:
    node = dict(settings["model"])
    dtype = DTYPES.get(str(node.get("dtype") or settings.get("dtype")), torch.float32)
    if (name := node.get("name")) is not None:
        import transformers

        if name not in _HUB:
            raise LookupError(f"the sizes of {name} are not known without loading it")
        family, config = _HUB[name]
        own = getattr(transformers, f"{family}Config")(**config)
        return getattr(transformers, f"{family}ForCausalLM")(own).to(dtype)
    if "weights" in node:
        node["weights"] = None
    shape, outputs = _shapes(settings)
    model: nn.Module = instantiate(node, input_shape=shape, num_outputs=outputs)
    return model.to(dtype)


def _name(data: Mapping[str, Any]) -> str:
    return str(data.get("name") or str(data["_target_"]).rpartition(".load_")[2])


def _shapes(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the shape of an input, and the number of outputs."""
    if "tokenizer" in settings:
        length = settings["sequence_length"]
        return (length if isinstance(length, int) else max(length.values()),), int(
            settings["tokenizer"]["vocabulary_size"]
        )
    node = settings["data"]
    name = _name(node)
    if name in _IMAGES:
        return _IMAGES[name]
    with torch.device("cpu"):
        splits = instantiate(node)
    return tuple(splits.input_shape), splits.num_outputs


def in_bytes(number: float) -> str:
    """Return 5.2 GB."""
    power = min(4, int(math.log(max(number, 1), 1000)))
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


# ------------------------------------------------------------------------------------ time
def _published(target: Target, preset: str) -> Iterator[str]:
    """Yield what each published preset took, and of `preset` its units."""
    for name in PRESETS:
        path = ROOT / "results" / target.key / name / "run.json"
        if not path.is_file():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        took = f"{record['unit_seconds']:,.0f} s of CPU time, {record['num_matvecs']:,} products"
        yield f"published, {name}: {took} ({record['device']})"
        if name == preset and isinstance(record["units"], list):
            for unit in record["units"]:
                yield f"  {unit['count']} x {unit['name']}, {unit['seconds']:,.0f} s"


# ------------------------------------------------------------------------------------ what is stored
class _NotStoredError(BaseException):
    """The first unit that is not in the store; no Exception, so that no target takes it for one of its own."""


class _LookingStore(Store):
    """A store that computes nothing and writes nothing."""

    def get_or_compute(
        self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the stored payload, or raise a _NotStoredError."""
        entry = self._read(self._path(name, config), quiet=True)
        if entry is None:
            raise _NotStoredError(name)
        self.hits += 1
        payload: dict[str, Any] = entry["payload"]
        return payload


def stored_units(target: Target, cfg: DictConfig) -> Iterator[str]:
    """Yield how many units are stored, and which is the first that is not: the target's own code is followed.

    The key of a unit holds numbers that units before it have found (damping, say), so that no config alone tells
    it. Cost: loading data and building networks; so nothing is looked for at `paper`, nor without a store.
    """
    if cfg.preset == "paper" or cfg.force or not Path(cfg.store.root).is_dir():
        return
    own = cfg.copy()
    OmegaConf.set_struct(own, False)
    own.progress, own.tracker = False, {"name": "none"}
    run = Run(own, key=target.key, title=target.title)
    run.store = _LookingStore(cfg.store.root)
    try:
        target.load("compute")(run, own)
    except _NotStoredError as first:
        yield f"store: {run.store.hits} units; first that is not there: {first} (then none was looked for)"
    except Exception as error:  # whatever stops a run without its data
        yield f"store: {run.store.hits} units; not followed further ({str(error).partition(chr(10))[0][:80]})"
    else:
        yield f"store: {run.store.hits} units, all there are"
