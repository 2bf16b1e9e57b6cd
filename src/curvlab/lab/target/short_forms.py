"""Overrides that need not name a task: `data=mnist`, `model.hidden_sizes=[64]`, `task=mlp_digits`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from curvlab.lab.runs import ConfigurationError

PARTS = ("data", "model", "training", "freeze")  # of a task


def expand(config_name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides as Hydra knows them, each with the one that was typed.

    `data=NAME` and `model=NAME` choose for every task, `data.KEY=...`, `model.KEY=...`, `training.KEY=...` and
    `freeze.KEY=...` set a key of every task; with `task=NAME` this one task is run, alone, and they mean it. What
    stands beside the tasks, for all of them, is left as it was typed. Needs an initialised Hydra.
    """
    typed = dict.fromkeys(overrides)
    chosen = [override for override in typed if override.startswith("task=")]
    short = [override for override in typed if _part(override)]
    if not chosen and not short:
        return {override: override for override in typed}
    rest = [override for override in typed if override not in chosen and override not in short]
    config = _composed(config_name, rest)
    if config is None:
        return {override: override for override in typed}  # mistyped: the check says where
    tasks = config.get("tasks")
    if tasks is None:  # a target without tasks has keys of these names itself, or none
        return {override: override for override in typed}
    rest += [override for override in short if _part(override) in config]
    short = [override for override in short if override not in rest]
    expanded = {override: override for override in rest}
    names = [str(name) for name in tasks]
    if chosen:
        name = chosen[-1].partition("=")[2]
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigurationError(f"no task {name!r} here{hint} This preset has: {', '.join(names)}.")
        expanded |= {f"~tasks.{other}": chosen[-1] for other in names if other != name}
        names = [name]
    for override in short:
        if len(names) > 1 and re.search(r"=[^\[{(]*,", override):
            raise ConfigurationError(
                f"{override!r} sweeps over {len(names)} tasks at once ({', '.join(names)}); add task=NAME."
            )
        expanded |= {_long(override, name): override for name in names}
    return expanded


def _part(override: str) -> str | None:
    """Return the part of a task that an override is short for, or None."""
    match = re.match(rf"\+{{0,2}}({'|'.join(PARTS)})(\.[\w.]+)?=", override)
    return match[1] if match else None


def _long(override: str, task: str) -> str:
    sign, key, value = re.fullmatch(r"(\+{0,2})([\w.]+)=(.*)", override, re.DOTALL).groups()  # type: ignore[union-attr]
    if key in ("data", "model"):  # config groups
        return f"{sign}{key}@tasks.{task}.{key}={value}"
    return f"{sign}tasks.{task}.{key}={value}"


def _composed(config_name: str, overrides: Sequence[str]) -> DictConfig | None:
    try:
        config = compose(config_name, [o for o in overrides if not o.startswith("hydra")])
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException):
        return None
    return config
