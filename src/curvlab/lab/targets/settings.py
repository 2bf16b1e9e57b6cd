"""Settings: those of each task, and ours beside the paper's, read from the config and the tables, never typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab.targets.target import Target

MISSING = "not set"
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


# ------------------------------------------------------------------------------------ beside the paper
def settings_beside_the_paper(
    target: Target, cfg: DictConfig, tables: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """Return name, ours and paper for every entry of the target's `paper`, the preset's tasks first."""
    paper = target.paper_settings
    found = ours(paper, cfg, tables)
    entries = [{"name": name, "ours": found[name], "paper": value} for name, value in paper.items()]
    if cfg.get("tasks") and "tasks" not in paper:
        entries.insert(0, {"name": "tasks", "ours": ours(["tasks"], cfg, {})["tasks"], "paper": ""})
    return entries


def ours(names: Iterable[str], cfg: DictConfig, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Return our values of settings by name: one value where all tasks agree, else one for each task.

    Args:
        names: keys of the config, or "<table>.csv:<column>".
        cfg: of the run.
        tables: as computed.
    """
    tasks = {task_label(name): own for name, own in plain_task_settings(cfg).items()}
    whole = OmegaConf.to_container(cfg, resolve=True)
    found: dict[str, Any] = {}
    for name in names:
        table, _, column = name.partition(".csv:")
        if column:
            found[name] = _of_table(tables[table], column)
        elif name == "tasks":
            found[name] = list(tasks)
        elif tasks:
            found[name] = _collapsed({task: _of_config(own, name) for task, own in tasks.items()})
        else:
            found[name] = _of_config(whole, name)
    return found


def _of_table(table: pd.DataFrame, column: str) -> Any:
    values = table[[*(["task"] if "task" in table else []), column]].drop_duplicates()
    own = values[column]
    # A text that is empty comes back as nan from a csv.
    found = [_rounded(v) for v in (own if pd.api.types.is_numeric_dtype(own) else own.astype(object).fillna(""))]
    if "task" not in table or values.task.duplicated().any():
        distinct = list(dict.fromkeys(found))
        return distinct[0] if len(distinct) == 1 else distinct
    return _collapsed(dict(zip(values.task, found, strict=True)))


def _rounded(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _of_config(config: Any, name: str) -> Any:
    found = list(_walk(config, name.split("."), ()))
    if not found:
        return MISSING
    return found[0][1] if found[0][0] == "" else _collapsed(dict(found))


def _walk(node: Any, parts: list[str], passed: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield what stands at a key, with the names that took the place of `*`."""
    if not parts:
        yield " ".join(passed), node
    elif isinstance(node, Mapping):
        names = list(node) if parts[0] == "*" else [parts[0]] if parts[0] in node else []
        for name in names:
            yield from _walk(node[name], parts[1:], (*passed, str(name)) if parts[0] == "*" else passed)


def _collapsed(values: dict[str, Any]) -> Any:
    distinct = [value for index, value in enumerate(values.values()) if value not in list(values.values())[:index]]
    return distinct[0] if len(distinct) == 1 else values
