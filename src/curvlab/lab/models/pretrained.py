"""Load a checkpoint safely: weights only, hash checked, shapes compared before anything is copied."""

from __future__ import annotations

import hashlib
import pickle
import re
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.files import write_atomically
from curvlab.lab.data.download import line_of

TIMEOUT_SECONDS = 15.0


def load_weights(model: nn.Module, path: Path, *, url: str | None = None) -> None:
    """Copy the checkpoint `path` into `model`, in place.

    The file holds a state dict, or {'state_dict': ...}; a prefix `module.` on its keys (from
    DataParallel) is dropped. When the name ends in a hash, as in `resnet20-12fca82f.th`, the file's sha256
    must start with it.

    Args:
        model: module to fill.
        path: checkpoint, read with `weights_only=True` onto the CPU.
        url: where to download it from when it is missing; None when it cannot be.

    Raises:
        FileNotFoundError: the file is missing and could not be downloaded.
        ValueError: the file is damaged, or belongs to another architecture.
    """
    if not path.is_file():
        _download(path, url)
    _check_hash(path)
    try:
        checkpoint: Any = torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
        raise ValueError(f"'{path}' is no readable checkpoint ({line_of(error)}): copy it anew") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"'{path}' holds a {type(checkpoint).__name__}, not a state dict: copy it anew")
    weights = checkpoint.get("state_dict", checkpoint)
    weights = {key.removeprefix("module."): value for key, value in weights.items()}
    _check_shapes(model, weights, path)
    model.load_state_dict(weights, strict=True)


def _download(path: Path, url: str | None) -> None:
    reason = "."
    if url is not None:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                content = response.read()
            write_atomically(path, content)
        except (OSError, HTTPException) as error:
            reason = f", and the download from {url} failed: {line_of(error)}."
        else:
            return
    raise FileNotFoundError(
        f"pretrained weights not found: looked for '{path}'{reason} Put the file there, set CURVLAB_DATA or "
        "data.root to the folder that holds weights/, or start from random weights with model.weights=null."
    )


def _check_hash(path: Path) -> None:
    expected = re.search(r"-([0-9a-f]{8,})$", path.stem)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected and not actual.startswith(expected[1]):
        raise ValueError(
            f"'{path}' is damaged: its sha256 starts with {actual[:8]}, not with the {expected[1]} of its "
            "name. Delete it, then run again to download it, or copy it anew."
        )


def _check_shapes(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    own_weights = model.state_dict()
    surplus = next((name for name in weights if name not in own_weights), None)
    if surplus is not None:
        raise ValueError(
            f"'{path}' does not fit this {type(model).__name__}: it holds {surplus}, which is not in the model"
        )
    for name, own in own_weights.items():
        # num_batches_tracked is missing in checkpoints from before torch 0.4.1, and changes nothing.
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, own)
        stored = tuple(weights[name].shape) if name in weights else None
        if name in weights and stored == tuple(own.shape):
            continue
        raise ValueError(
            f"'{path}' does not fit this {type(model).__name__}: {name} has shape {tuple(own.shape)} here and "
            f"{stored} there. Choose the data= it was trained on, or model.weights=null."
        )
