"""Every method's detection curve, seed by seed, and their means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from scipy.stats import spearmanr

from curvlab.influence import detection_curve
from curvlab.lab import Run, t_interval, task_settings
from experiments.pbrf.fig6.network import CorruptedTask, load_task
from experiments.pbrf.fig6.scores import INFLUENCE, INFLUENCE_TOTAL, LOSS, PBRF, PBRF_TOTAL, all_scores

INSPECTED = (0.05, 0.1, 0.2, 0.3, 0.5)  # columns of the table
NUM_STEPS = 100  # of the drawn curves


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each method, the same for each seed, the curves, and one row for each network."""
    rows: dict[str, list[dict[str, Any]]] = {"seeds": [], "curves": [], "networks": []}
    for name, settings in with_descent(task_settings(cfg)).items():
        for seed in settings.seeds:
            for table, found in _rows(load_task(run, name, settings, seed)).items():
                rows[table] += found
    tables = {name: pd.DataFrame(found) for name, found in rows.items()}
    return {"table": summary(tables["seeds"]), **tables}


def with_descent(settings: Mapping[str, DictConfig]) -> dict[str, DictConfig]:
    """Return every task's settings with `descent` null where a task has left the key out by its own null."""
    nothing = OmegaConf.create({"descent": None})
    return {name: DictConfig(OmegaConf.merge(nothing, own)) for name, own in settings.items()}


def _rows(task: CorruptedTask) -> dict[str, list[dict[str, Any]]]:
    scores, quality = all_scores(task)
    wrong = task.corrupted.mislabelled.cpu()
    grid = np.linspace(0, 1, NUM_STEPS + 1)
    seeds, curves = [], []
    for method, values in scores.items():
        names = {"task": task.label, "method": method, "seed": task.seed}
        curve = detection_curve(values, wrong)
        found = {_column(inspected): curve.at(inspected) for inspected in INSPECTED}
        seeds.append(names | found | {"area": curve.area})
        curves += [names | {"inspected": float(at), "found": curve.at(float(at))} for at in grid]
    return {"seeds": seeds, "curves": curves, "networks": [_network(task, scores, quality)]}


def _network(task: CorruptedTask, scores: dict[str, torch.Tensor], quality: dict[str, float]) -> dict[str, Any]:
    row = {"task": task.label, "seed": task.seed, "N": task.num_train}
    row |= {"mislabelled": int(task.corrupted.mislabelled.sum()), "epochs": task.settings.training.num_epochs}
    columns = ("train_loss", "wrong_label_loss", "wrong_labels_predicted", "test_accuracy")
    row |= {name.replace("_", " "): task.trained[name] for name in columns} | quality
    for label, pair in {"own": (PBRF, INFLUENCE), "total": (PBRF_TOTAL, INFLUENCE_TOTAL)}.items():
        if pair[0] in scores:
            row[f"spearman {label}"] = _spearman(*(scores[name] for name in pair))
    if PBRF in scores:  # what any two scores of mislabelled data share
        row["spearman PBRF and loss"] = _spearman(scores[PBRF], scores[LOSS])
    return row


def _spearman(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(spearmanr(first.double(), second.double()).statistic)


def _column(inspected: float) -> str:
    return f"found at {100 * inspected:g} %"


def summary(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds with their t intervals, one row for each task and method."""
    columns = [*map(_column, INSPECTED), "area"]
    rows = []
    for (task, method), own in seeds.groupby(["task", "method"], sort=False):
        row: dict[str, Any] = {"task": task, "method": method, "seeds": len(own)}
        for column in columns:
            interval = t_interval(own[column])
            row |= {column: own[column].mean(), f"{column} low": interval.low, f"{column} high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)
