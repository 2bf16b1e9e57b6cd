"""Both halves on every task."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.lab import runs, task_settings
from experiments.benchmarks.preconditioners.estimates import estimate_rows
from experiments.benchmarks.preconditioners.sampling import sampling_tables
from experiments.benchmarks.preconditioners.solving import solving_rows
from experiments.benchmarks.preconditioners.systems import Systems
from experiments.shared.task import Task


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return products and seconds to each residual, LiSSA's ends and trajectories, and estimates from batches."""
    solved: list[dict[str, Any]] = []
    sampled: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    estimates: list[dict[str, Any]] = []
    for name, settings in task_settings(cfg).items():
        task = Task.load(run, name, settings).trained()
        systems = Systems(run, task, settings)
        about = {"fitted": settings.fitted, "train_loss": task.train_loss, "damping": systems.damping}
        solved += [row | about for row in solving_rows(systems)]
        rows, trajectories = sampling_tables(systems)
        sampled += [row | about for row in rows]
        steps += trajectories
        estimates += [row | {"fitted": settings.fitted} for row in estimate_rows(systems)]
    run.note(
        seconds="CPU seconds of one process" if run.device.type == "cpu" else "seconds",
        threads=torch.get_num_threads(),
    )
    table = pd.DataFrame(solved)
    return {
        "table": table.drop(columns="seconds"),
        "timing": table.drop(columns=["products", "residual"]),
        "lissa": pd.DataFrame(sampled),
        "lissa_steps": pd.DataFrame(steps),
        "estimates": pd.DataFrame(estimates),
    }
