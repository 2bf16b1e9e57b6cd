"""Fig. 1, compute: scores of every task, a row for each panel, and the training images."""

from __future__ import annotations

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from experiments.lissa.fig1.larger_epsilon import larger_epsilon_table
from experiments.lissa.fig1.scores import compute_scores
from experiments.lissa.fig1.tables import cell_table, panel_table, rounded, score_table, summary_row
from experiments.shared.task import Task


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary`, `cells`, `larger_epsilon` and `scores_<task>`.

    One row for each task, choice of C, point and seed; for each task; for each cell of the 2 x 2, fitted or early
    and C = 2 or measured; for each point and seed with the larger epsilon; for each point and test point, what the
    panels show.

    Beside them images_<task>.png, the training images side by side.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one what `compute_scores` takes.
    """
    scores, panels, larger, summary, seeds = {}, [], [], [], set()
    for name, settings in task_settings(cfg).items():
        task = Task.load(run, name, settings).trained()
        found = compute_scores(run, task, settings)
        table = score_table(found)
        scores[f"scores_{task.label}"] = rounded(table)
        panels.append(panel_table(task.label, table, found))
        larger.append(larger_epsilon_table(task.label, float(settings.larger.epsilon), found))
        summary.append(summary_row(task, found, panels[-1]))
        images = [np.round(255 * task.splits.to_image(image)).astype(np.uint8) for image in found.images]
        run.save_image(np.concatenate(images, axis=1), f"images_{task.label}.png")
        seeds |= set(range(settings.num_seeds))
    run.note(seeds=sorted(seeds))
    table, of_tasks = pd.concat(panels, ignore_index=True), pd.DataFrame(summary)
    tables = {"table": table, "summary": of_tasks, "cells": cell_table(table, of_tasks)}
    return tables | {"larger_epsilon": pd.concat(larger, ignore_index=True), **scores}
