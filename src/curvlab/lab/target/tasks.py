"""Settings of one task: what the target sets for all of them, changed by what the task says itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# What every target has: see conf/base.yaml. No setting of a task.
BASE_KEYS = ("tracker", "force", "progress", "results", "store", "preset", "command", "hydra", "task")


def task_settings(config: DictConfig | Mapping[str, Any]) -> dict[str, DictConfig]:
    """Return the settings of every task by its name, in the order of the config.

    A target lists its tasks under `tasks`; whatever stands beside them holds for all, and a task may have any of
    these keys itself (mappings are merged; an entry that is null in the task is left out).

    Args:
        config: of a run, or as read back from run.json.
    """
    return {name: OmegaConf.create(own) for name, own in plain_task_settings(config).items()}


def plain_task_settings(config: DictConfig | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same as dicts, which takes less time."""
    whole = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    plain: dict[str, Any] = OmegaConf.to_container(whole, resolve=True)  # type: ignore[assignment]  # a mapping
    tasks = plain.pop("tasks", None) or {}
    shared = {key: value for key, value in plain.items() if key not in BASE_KEYS}
    return {name: merged(shared, own) for name, own in tasks.items() if own is not None}


def merged(shared: Any, own: Any) -> Any:
    """Return `shared` with the entries of `own`; those of mappings one by one, where null removes one."""
    if not (isinstance(shared, Mapping) and isinstance(own, Mapping)):
        return own
    result = dict(shared)
    for key, value in own.items():
        if value is None and isinstance(result.get(key), Mapping):
            del result[key]
        else:
            result[key] = merged(result[key], value) if key in result else value
    return result


def task_label(name: str) -> str:
    """Return a task's name as tables and figures show it: "mlp_digits" -> "mlp-digits"."""
    return name.replace("_", "-")
