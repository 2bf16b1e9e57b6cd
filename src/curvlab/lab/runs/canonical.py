"""One text for one config, so that a hash of it can be a key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf


def plain(value: Any, *, where: str = "config") -> Any:
    """Return `value` as dicts, lists, numbers and strings, with interpolations resolved.

    Raises:
        TypeError: for anything else, tensors included: their text is no exact key. `where` names the place.
    """
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {text_key(key, where): plain(entry, where=f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, where=f"{where}[{index}]") for index, entry in enumerate(value)]
    raise TypeError(
        f"{where} is a {type(value).__name__}; use numbers, strings, lists and mappings of them "
        "(of a tensor or an array, name what it was made from instead)."
    )


def text_key(key: Any, where: str) -> str:
    """Return `key` when it is a string: JSON would merge the keys 1 and "1"."""
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; use strings as keys, here {str(key)!r}.")
    return key


def digest(value: Any, *, where: str = "config") -> str:
    """Return the sha256 of the canonical JSON: keys sorted, floats with all their digits, 1 apart from 1.0."""
    text = json.dumps(plain(value, where=where), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
