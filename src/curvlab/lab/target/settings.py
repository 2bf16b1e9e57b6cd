"""Ours beside the paper's: settings that are read from the config and the tables, never typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab.target.declaration import Target
from curvlab.lab.target.tasks import plain_task_settings, task_label

MISSING = "not set"


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
    found = [_rounded(value) for value in values[column]]
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
