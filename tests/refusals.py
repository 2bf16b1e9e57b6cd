"""Calls that are refused, or stopped on the way, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Errors = type[BaseException] | tuple[type[BaseException], ...]


def refuses(
    text: str, call: Callable[..., Any], *arguments: Any, error: Errors = ValueError, **settings: Any
) -> None:
    """Check that a call raises `error`, with what matches `text` in its message."""
    with pytest.raises(error, match=text):
        call(*arguments, **settings)


def stopped(step: int, call: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    """Make a call that ends at a step as by a kill: in its callback, before the step is saved."""

    def stop(state: Any) -> None:
        if state.num_steps == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(*arguments, callback=stop, **settings)
