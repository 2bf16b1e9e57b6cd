"""Numbers that users pass: checked before anything is computed, with an error that names the argument."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor


def positive(name: str, value: object, why: str = "") -> float:
    """Return a positive, finite number, or raise a ValueError (a TypeError for what is none).

    >>> positive("damping", 0.1)
    0.1
    """
    found = real(name, value)
    if not 0 < found < math.inf:
        what = "positive" if math.isfinite(found) else "positive and finite"
        raise ValueError(f"{name} must be {what}, got {value}{why and ': ' + why}")
    return found


def real(name: str, value: object) -> float:
    """Return a number, also of a tensor with one element."""
    one = getattr(value, "numel", lambda: 0)() == 1
    if isinstance(value, bool) or not (isinstance(value, Real) or one):
        shape = tuple(getattr(value, "shape", ()))
        got = f"{type(value).__name__} of shape {shape}" if shape else repr(value)
        raise TypeError(f"{name} must be one number, got {got}")
    return float(value)  # type: ignore[arg-type]


def not_negative(name: str, value: object) -> float:
    """Return a finite number of at least 0, or raise a ValueError (a TypeError for what is none)."""
    found = real(name, value)
    if not 0 <= found < math.inf:
        what = "be finite" if found == math.inf else "not be negative"
        raise ValueError(f"{name} must {what}, got {value}")
    return found


def whole(name: str, value: object, *, least: int = 1, why: str = "") -> int:
    """Return a whole number of at least `least`, or raise a ValueError (a TypeError for what is none)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not isinstance(value, Integral) and not float(value).is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    number = int(value) if isinstance(value, Integral) else int(float(value))
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{why and ': ' + why}")
    return number


def tensor(name: str, value: Any, *, ndim: int | None = None, shape: str = "", rows: int | None = None) -> Tensor:
    """Return a tensor of so many dimensions, written as `shape`, the first of size `rows`; or raise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor{shape and ', ' + shape}, got {type(value).__name__}")
    if (ndim is not None and value.ndim != ndim) or (rows is not None and len(value) != rows):
        of = "" if rows is None else f" with {rows} rows"
        raise ValueError(f"{name} must have the shape {shape}{of}, got {tuple(value.shape)}")
    return value
