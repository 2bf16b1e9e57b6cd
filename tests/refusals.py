"""A call that is refused, in one line."""

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
