"""Output that goes through a pipe whose reader may have seen enough: `... help | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """End quietly what is printed inside when the reader of standard output has gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer would raise once more when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
