"""How a claim's numbers and notes stand in a table of a page."""

from __future__ import annotations

import math
import re
from typing import Any

from curvlab.lab.claims.claims import ClaimResult

_LONGEST_NOTE = 240  # characters; all of it stands in claims.json


def number_text(value: Any) -> str:
    """Return a number with four significant digits; text as it is; nothing for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    is_whole = float(value).is_integer() and (isinstance(value, int) or abs(value) < 1e6)
    return f"{float(value):z.0f}" if is_whole else f"{value:.4g}"


def value_text(result: ClaimResult) -> str:
    """Return the measured value with its interval, e.g. "0.9 [0.8, 0.95] (t 95 %, 3 seeds)"."""
    if result.value is None or result.interval is None:
        return "not measured"
    text, interval = number_text(result.value) or "nan", result.interval
    if interval.low == interval.high == result.value:
        return f"{text} ({interval.kind})"
    if math.isnan(interval.low) and math.isnan(interval.high):
        return f"{text} (no interval: {interval.kind})"
    return f"{text} [{number_text(interval.low) or '?'}, {number_text(interval.high) or '?'}] ({interval.kind})"


def note(result: ClaimResult) -> str:
    """Return the criterion and why it was missed, without the numbers that stand beside, cut to a length."""
    text = re.sub(r"^Measured .*?; needed: ", "needed: ", result.explanation)
    if not text.startswith("needed: "):
        text = f"needed: {result.claim.criterion}. {text}".strip()
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE].rpartition(' ')[0]} …"


def cell(text: str) -> str:
    """Return text for a cell of a table: one line, in which nothing is markup by accident."""
    return re.sub(r"(?<!`)([|*<~$])", r"\\\1", " ".join(str(text).split()))
