"""What a user sees while something runs: a bar, and from the first steps how long it will take.

Every layer may import this module.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from tqdm.auto import tqdm

_SECONDS_BEFORE_BAR = 1.0
SECONDS_WORTH_A_FORECAST = 10.0
_SILENT = ContextVar("silent", default=False)
_AROUND: ContextVar[Forecast | None] = ContextVar("around", default=None)  # of the steps of which this is a part

P = ParamSpec("P")
R = TypeVar("R")


def can_be_silent(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with an argument `progress`, of which False silences all that it calls, too.

    It runs as it does outside of torch.no_grad() and torch.inference_mode().
    """

    @wraps(function)
    @torch.inference_mode(False)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in ("callback", "on_epoch_end", "step"):
            if kwargs.get(name) is not None and not callable(kwargs[name]):
                raise TypeError(f"{name} is a function of the state, got {kwargs[name]!r}")
        if kwargs.get("progress", True) is not False:
            return function(*args, **kwargs)
        before = _SILENT.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _SILENT.reset(before)

    return call


@contextmanager
def around(forecast: Forecast) -> Iterator[None]:
    """Let the parts of a step, bars with `part=True`, tell their own time until `forecast` is given."""
    before = _AROUND.set(forecast)
    try:
        yield
    finally:
        _AROUND.reset(before)


class Forecast:
    """How long work will take, told once, from the first steps.

    Attributes:
        text: "about 3 min", once it is known and worth telling.
        given: whether nothing more is to be found out.
        foreseen: how many parts there are, of so many columns where they are products, before any is done.
    """

    def __init__(self, name: str, done: int, *, bar: Bar | None = None, part: int = 0) -> None:
        self.name, self.text, self.given = name, "", False
        self.foreseen: Callable[[int], float | None] = lambda columns: None
        self._bar, self._columns, self._around = bar, part, _AROUND.get()
        self.begin(done)
        if self._around is not None:
            self.given, self.name = self._around.given, f"{self._around.name}, one {name}" if part else name

    def begin(self, done: int) -> None:
        """Time the steps from here on: so many were taken before."""
        self._first, self._one, self._began = done, done, time.monotonic()
        self._after_one: float | None = None  # the first step may have more to do than the others

    def look(self, num_steps: int, expected: float | None) -> None:
        """Find out after a step; `expected` is the number of the last one."""
        now = time.monotonic()
        if self._after_one is None:
            self._after_one, self._one = now, num_steps
        later, past_first = num_steps - self._one, now - self._after_one
        if expected is None or (past_first < 1 and now - self._began < 6 * SECONDS_WORTH_A_FORECAST):
            return
        each = past_first / later if later else (now - self._began) / max(1, num_steps - self._first)
        self._tell(now - self._began + each * max(0.0, expected - num_steps))

    def _tell(self, seconds: float) -> None:
        """Tell how long the work takes; or how long that takes of which it is the first of so many parts."""
        self.given, whole = True, self._around
        if whole is not None and not whole.given and (parts := whole.foreseen(self._columns)) is not None:
            whole._tell(self._began - whole._began + parts * seconds)
            self.text = whole.text and f"in all {whole.text}"
        elif seconds > SECONDS_WORTH_A_FORECAST:
            self.text = f"about {duration(seconds)}"
            if self._bar is None or self._bar.disable:
                logging.getLogger("curvlab").info("%s: %s", self.name, self.text)
        if self.text and self._bar is not None:
            self._bar.set_postfix_str(self.text, refresh=False)


class Bar(tqdm):
    """A bar of `progress_bar`, that says once how long the work will take, or tells the logger "curvlab".

    Attributes:
        expected: the number of the last step, where that is another than `total`.
        forecast: what has been found out.
    """

    def __init__(self, name: str, *, told: bool, part: int, **settings: Any) -> None:
        self.expected: float | None = None
        self._told, self._steps = told, 0
        self.forecast = Forecast(name, 0, bar=self, part=part)
        super().__init__(desc=name, **settings)

    def begin(self, done: int) -> None:
        """Count from here on: so many steps were taken before."""
        self.n = self.initial = self.last_print_n = self._steps = done
        self.forecast.begin(done)

    def __iter__(self) -> Iterator[Any]:
        """Yield the steps, each counted when the next is asked for."""
        try:
            for step in self.iterable:
                yield step
                self.update()
        finally:
            self.close()

    def update(self, n: float | None = 1) -> bool | None:
        """Count steps, and find out how long all of them will take."""
        self._steps += int(n or 0)
        if self._told and not self.forecast.given:
            last = self.total if self.expected is None else self.expected
            self.forecast.look(self._steps, last)
        return super().update(n)


def progress_bar(
    name: str,
    steps: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    progress: bool | str = True,
    part: int = 0,
) -> Bar:
    """Return a bar that shows itself after a second, on a terminal or in a notebook; a text is its name.

    Work of a known total that will take more than ten seconds says so once the first steps have been timed
    ("about 3 min"): beside the bar, and where there is none to the logger "curvlab", at the level INFO. A `part`
    of other work, a product of so many columns, does so only as long as that has not: for all of that work where
    it is foreseen. In a notebook, which has one line for bars, it shows none.
    """
    told = bool(progress) and _talks()
    in_notebook = "ipykernel" in sys.modules and not (part and _AROUND.get())
    seen = told and (sys.stderr.isatty() or in_notebook)
    return Bar(
        progress if isinstance(progress, str) else name,
        iterable=steps,
        total=total,
        told=told,
        part=part,
        delay=_SECONDS_BEFORE_BAR,
        disable=not seen,
        leave=False,
        file=sys.stderr,
        unit="step",
    )


def is_heard() -> bool:
    """Return whether anybody would see a bar, or read in the log how long its work takes."""
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return (seen or logging.getLogger("curvlab").isEnabledFor(logging.INFO)) and _talks()


def announce(line: str, *, worth_a_line: bool) -> None:
    """Tell a choice before long work: on a terminal where it is `worth_a_line`, else to the logger "curvlab"."""
    if not _talks():
        return
    if worth_a_line and sys.stderr.isatty():
        print(line, file=sys.stderr)
    else:
        logging.getLogger("curvlab").info("%s", line)


def _talks() -> bool:
    """Return whether this process talks: of those that torchrun started, the first one alone."""
    return os.environ.get("RANK", "0") == "0" and not _SILENT.get()


def duration(seconds: float) -> str:
    """Return e.g. "40 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
