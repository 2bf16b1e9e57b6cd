"""Results are published: they name no folder, and so no user, of the machine that made them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# An absolute path, or one that climbs out of the repository, inside a longer text. Not the // of a URL.
_PATH = re.compile(r"(?<![\w.>/])(?:file:/+|~\w*/|(?:\.\./)+|/)(?=[\w.~-])[^\s'\",;\]})]*")


def without_paths(value: Any, roots: Mapping[str, str]) -> Any:
    """Return `value` (dicts, lists, scalars) with every path of this machine replaced by a placeholder.

    Args:
        value: what is going to be published.
        roots: placeholder by folder, from `path_roots`; a path below one keeps its end, "<data root>/mnist".
            Any other path becomes "<path>".
    """
    if isinstance(value, Mapping):
        return {key: without_paths(entry, roots) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(entry, roots) for entry in value]
    if not isinstance(value, str):
        return value
    for folder in sorted(roots, key=len, reverse=True):
        value = re.sub(rf"{re.escape(folder.rstrip('/'))}(?![\w.-])", roots[folder], value)
    return "<path>" if _is_outside(value) else _PATH.sub("<path>", value)


def path_roots(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the placeholder of every folder that `config` names under a key `root`, e.g. "<data root>"."""
    return {folder: f"<{name} root>" for name, folder in _roots(config) if _is_outside(folder)}


def _roots(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _roots(value, str(key))
        elif key == "root" and isinstance(value, str):
            yield name, value


def _is_outside(text: str) -> bool:
    return re.match(r"/[\w.~-]|~\w*/|\.\.(/|$)|file:/", text) is not None
