"""What a run is doing, as lines on stderr: something within two seconds, and at every change of work."""

from __future__ import annotations

import sys
import time

from tqdm.auto import tqdm

_SECONDS_BETWEEN_STORED_UNITS = 2.0


class Status:
    """Prints "<target>: <work>" lines.

    Args:
        target: what they begin with.
        silent: print nothing.
        num_expected: units of work that an earlier run of the same target had; None when there was none.
    """

    def __init__(self, target: str, *, silent: bool = False, num_expected: int | None = None) -> None:
        self.target = target
        self.silent = silent
        self.num_expected = num_expected
        self.num_units = 0
        self._last_time = 0.0

    def say(self, work: str) -> None:
        """Print one line."""
        if not self.silent:
            tqdm.write(f"{self.target}: {work}", file=sys.stderr)  # keeps a progress bar whole
            sys.stderr.flush()
        self._last_time = time.monotonic()

    def unit(self, work: str, *, stored: bool = False, resumed: bool = False) -> None:
        """Count a unit of work, and print a line about it; about one found in the store, every two seconds."""
        self.num_units += 1
        if stored and time.monotonic() - self._last_time < _SECONDS_BETWEEN_STORED_UNITS:
            return
        expected = f" of about {self.num_expected}" if self.num_expected else ""
        state = ", stored" if stored else ", resumed" if resumed else ""
        self.say(f"{work} (unit {self.num_units}{expected}{state})")
