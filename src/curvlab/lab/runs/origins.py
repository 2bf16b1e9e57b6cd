"""Where units of work come from: the commit, the versions and the code that computed each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from curvlab.lab.runs.fingerprint import code_roots, fingerprint, function_name
from curvlab.lab.runs.provenance import Commit, versions

Origin = dict[str, Any]

_SUMMED = ("count", "seconds")
_fingerprint = lru_cache(maxsize=None)(fingerprint)


def origin_of(
    name: str,
    version: int,
    compute: Callable[..., Any],
    config: Mapping[str, Any],
    *,
    commit: Commit,
    device: str,
) -> Origin:
    """Return what is stored with a unit that is computed now: plain values.

    Keys: name and version of the unit; those of `code_of`;
    commit and clean of the source tree; versions of the packages; device.
    """
    return {
        "name": name,
        "version": version,
        **code_of(compute, config),
        "commit": commit.commit,
        "clean": commit.clean,
        "versions": versions(),
        "device": device,
    }


def code_of(compute: Callable[..., Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return function, "module:name"; roots and fingerprint of its code, see `runs.fingerprint`."""
    roots = code_roots(compute, config)
    return {"function": function_name(compute), "roots": list(roots), "fingerprint": _fingerprint(roots)}


def grouped(origins: Iterable[Origin]) -> list[Origin]:
    """Return one entry for each distinct origin, with the `count` and the `seconds` of its units summed up."""
    groups: dict[str, Origin] = {}
    for origin in origins:
        counted = {"count": 1, "seconds": 0.0} | origin
        identity = repr(sorted((key, repr(value)) for key, value in counted.items() if key not in _SUMMED))
        if identity in groups:
            for key in _SUMMED:
                groups[identity][key] += counted[key]
        else:
            groups[identity] = counted
    return [group | {"seconds": round(group["seconds"], 3)} for group in groups.values()]


def is_stale(origin: Mapping[str, Any]) -> bool:
    """Return whether the code of a unit has changed since it was computed."""
    return bool(_fingerprint(tuple(origin["roots"])) != origin["fingerprint"])
