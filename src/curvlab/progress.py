"""What a user sees while something runs: a bar, and from the first steps how long it will take.

Every layer may import this module.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tqdm.auto import tqdm

_SECONDS_BEFORE_BAR = 1.0
_SECONDS_WORTH_A_FORECAST = 10.0
_SILENT = ContextVar("silent", default=False)

P = ParamSpec("P")
R = TypeVar("R")


def can_be_silent(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with an argument `progress`, of which False silences all that it calls, too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("progress", True) is not False:
            return function(*args, **kwargs)
        before = _SILENT.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _SILENT.reset(before)

    return call


def progress_bar(
    name: str,
    steps: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    done: int = 0,
    progress: bool | str = True,
) -> tqdm:
    """Return a bar that shows itself after a second, on a terminal or in a notebook; a text is its name."""
    # Of processes started by torchrun, the first one alone talks.
    alone = os.environ.get("RANK", "0") == "0"
    seen = bool(progress) and alone and not _SILENT.get() and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    return tqdm(
        steps,
        desc=progress if isinstance(progress, str) else name,
        total=total,
        initial=done,
        delay=_SECONDS_BEFORE_BAR,
        disable=not seen,
        leave=False,
        file=sys.stderr,
        unit="step",
    )


class Forecast:
    """How long work will take, told once, from the first steps.

    Attributes:
        text: "about 3 min", once it is known and worth telling.
        given: whether nothing more is to be found out.
    """

    def __init__(self, name: str, done: int) -> None:
        self.name, self.text, self.given = name, "", False
        self._first, self._began = done, time.monotonic()
        self._after_one: float | None = None  # the first step may have more to do than the others

    def look(self, num_steps: int, expected: float | None, *, silent: bool) -> None:
        """Find out after a step; `expected` is the number of the last one. `silent`: the bar shows it."""
        now = time.monotonic()
        if self._after_one is None:
            self._after_one = now
        taken, past_first = num_steps - self._first, now - self._after_one
        if expected is None or (past_first < 1 and now - self._began < 6 * _SECONDS_WORTH_A_FORECAST):
            return
        each = past_first / (taken - 1) if taken > 1 else now - self._began
        seconds = now - self._began + each * max(0.0, expected - num_steps)
        self.given = True
        if seconds > _SECONDS_WORTH_A_FORECAST:
            self.text = f"about {_duration(seconds)}"
            if not silent:
                logging.getLogger("curvlab").info("%s: %s", self.name, self.text)


def _duration(seconds: float) -> str:
    """Return e.g. "40 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
