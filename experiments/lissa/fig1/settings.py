"""Fig. 1, settings: step size, batch size and steps, as given or as they follow from the spectrum."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from omegaconf import DictConfig

from curvlab.solvers import LissaHyperparameters, lissa_hyperparameters


def given_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings of LiSSA as the config has them, None where they follow from the spectrum."""
    return {name: cfg.lissa[name] for name in ("step_size", "batch_size", "num_steps")}


def settings_of(cfg: DictConfig, spectrum: dict[str, float], damping: float) -> LissaHyperparameters:
    """Return the settings of C = 2: as given, else those of Corollary 1 and Table 1."""
    given = given_settings(cfg)
    if None not in given.values():
        return LissaHyperparameters(**given)
    recipe = _recipe(spectrum, damping, cfg.lissa.constant)
    return dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})


def measured_batch_size(
    spectrum: dict[str, float], damping: float, constant: float, step_size: float | None
) -> int:
    """Return |B| >= C tr / (1 / step_size - damping), App. B.2: C tr / λmax for the step size of Corollary 1."""
    if step_size is None:
        return _recipe(spectrum, damping, constant).batch_size
    if step_size * damping >= 1:
        raise ValueError(f"lissa.step_size must be below 1 / damping = {1 / damping:.3g}, got {step_size:.3g}")
    return math.ceil(constant * spectrum["trace"] / (1 / step_size - damping))


def _recipe(spectrum: dict[str, float], damping: float, constant: float) -> LissaHyperparameters:
    """Return the settings of Corollary 1 and Table 1, with C = `constant`."""
    return lissa_hyperparameters(
        trace=spectrum["trace"],
        largest_eigenvalue=spectrum["largest_eigenvalue"],
        damping=damping,
        constant=constant,
    )
