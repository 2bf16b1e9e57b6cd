"""The six factors of App. C.4: what is changed at each of their levels, all else as in the task."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from curvlab.lab import ConfigurationError


@dataclass(frozen=True)
class Level:
    """One level of one factor.

    Attributes:
        factor: one of `FACTORS`.
        value: of the factor.
        settings: of the task, with this value.
        fraction: of the training set that is left out at a time; None: single points.
    """

    factor: str
    value: float
    settings: DictConfig
    fraction: float | None


def _width(settings: DictConfig, value: float) -> dict[str, Any]:
    return {"model": {"hidden_sizes": [int(value)] * len(settings.model.hidden_sizes)}}


def _depth(settings: DictConfig, value: float) -> dict[str, Any]:
    return {"model": {"hidden_sizes": [settings.model.hidden_sizes[0]] * int(value)}}


FACTORS: dict[str, Callable[[DictConfig, float], dict[str, Any]]] = {
    "width": _width,  # of every hidden layer, at the task's depth
    "depth": _depth,  # hidden layers of the task's width
    "epochs": lambda settings, value: {"training": {"num_epochs": int(value)}},  # K of the base run
    "weight_decay": lambda settings, value: {"training": {"weight_decay": float(value)}},
    "damping": lambda settings, value: {"damping": float(value)},
    "removed": lambda settings, value: {},  # see `Level.fraction`
}


def levels(settings: DictConfig) -> list[Level]:
    """Return the levels of every factor of a task, or of the one `factor`, or its one `level`.

    Args:
        settings: of the task: `factors`, the levels by factor; `factor`; `level`, which need not be among them.
    """
    chosen, level = settings.get("factor"), settings.get("level")
    if chosen is None and level is not None:
        raise ConfigurationError(f"level={level} of what? Add factor={', factor='.join(FACTORS)}.")
    if chosen is not None and chosen not in FACTORS:
        near = difflib.get_close_matches(str(chosen), FACTORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigurationError(f"no factor {chosen!r}{hint} There are: {', '.join(FACTORS)}.")
    wanted = {factor: values for factor, values in settings.factors.items() if chosen in (None, factor)}
    if level is not None:
        wanted = {chosen: [level]}
    return [_level(settings, factor, value) for factor, values in wanted.items() for value in values]


def base_level(settings: DictConfig, factor: str) -> float | None:
    """Return the value that the task itself has; None of `removed`, which is one example there."""
    sizes, training = settings.model.hidden_sizes, settings.training
    own = {"width": sizes[0], "depth": len(sizes), "epochs": training.num_epochs}
    own |= {"weight_decay": training.weight_decay, "damping": settings.damping}
    return own.get(factor)


def _level(settings: DictConfig, factor: str, value: Any) -> Level:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"a level of {factor} is a positive number, got {value!r}.")
    if factor == "removed" and value >= 1:
        raise ConfigurationError(f"a level of removed is a fraction of the training set below 1, got {value:g}.")
    changed = OmegaConf.merge(settings, FACTORS[factor](settings, value))
    assert isinstance(changed, DictConfig)
    return Level(factor, value, changed, float(value) if factor == "removed" else None)
