"""Units of work as functions: the keyword arguments are the key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlab.lab.runs.run import Run


def unit(
    name: str, *, version: int, about: str = "", resumes: bool = False
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Make a function a unit of work: stored under its keyword arguments, and found by any run that has the same.

        @unit("rank1/descent", version=1, about="descent from {start}")
        def descent(run, objective, /, *, start, delta):
            return {"norms": ...}

        descent(run, objective, start=0.9, delta=0.1)["norms"]

    The keyword arguments are all that the result depends on (plain values: numbers, strings, lists, mappings,
    configs); `run.cfg.seed` is added unless there is a `seed`. The positional ones are what it is computed with,
    and must follow from the key: a model, its data.

    Args:
        name: kind of unit, shared by targets that do the same work.
        version: of the meaning of the key and of the code: raise it when a change must not reuse what was stored.
        about: for the terminal, with `{key}`s of the keyword arguments; the name unless given.
        resumes: the function gets `checkpoint`, a folder of its own, while it is computed, as `Run.unit` says.
    """

    def decorate(compute: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(compute)
        def stored(run: Run, *given: Any, **key: Any) -> dict[str, Any]:
            def computed(*folder: Any) -> dict[str, Any]:
                extra: Mapping[str, Any] = {"checkpoint": folder[0]} if folder else {}
                return compute(run, *given, **key, **extra)

            functools.update_wrapper(computed, compute)
            text = about.format(**key) if about else name
            return run.unit(name, key, computed, version=version, about=text, resumes=resumes)

        return stored

    return decorate
