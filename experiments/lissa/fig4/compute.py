"""Fig. 4, compute: both sides of condition C.1 at each batch size, and C by direction."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from experiments.lissa.fig4.slopes import slopes
from experiments.lissa.fig4.traces import sampling_gap, token_gap
from experiments.shared import spectrum as units
from experiments.shared.constant_bounds import constant_bounds
from experiments.shared.task import Task, TrainedTask


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each batch size; `constants` and `summary`, one for each task.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `condition`, `assumed_constant` (C), and the settings of the
            units that are shared: `spectrum`, `constant`.
    """
    rows, constants = [], []
    for name, own in task_settings(cfg).items():
        task = Task.load(run, name, own).trained()
        spectrum = units.spectrum(run, task, own)
        rows += traces(run, task, own, spectrum)
        constants.append(constant_row(run, task, own, spectrum))
    table, measured = pd.DataFrame(rows), pd.DataFrame(constants)
    run.note(seeds=[cfg.seed])
    return {"table": table, "constants": measured, "summary": summary(table, measured)}


def traces(run: Run, task: TrainedTask, cfg: DictConfig, spectrum: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each batch size: traces of both sides over P with errors; C = 1 on the right."""
    per_example = task.predictions_per_example
    # tr² without the bias of squaring an estimate; its error to first order.
    square = spectrum["trace"] ** 2 - spectrum["trace_stderr"] ** 2
    stderr = 2 * spectrum["trace"] * spectrum["trace_stderr"]
    found = [
        ("examples", size, size * per_example, sampling_gap(run, task, cfg, batch_size=size))
        for size in cfg.condition.batch_sizes
    ]
    if task.is_language and cfg.condition.token_batch is not None:
        size = cfg.condition.token_batch
        found.append(("single tokens", size, float(size), token_gap(run, task, cfg)))
    return [
        {
            "task": task.label,
            "sampling": sampling,
            "examples": size,
            "batch_size": predictions,  # |B|, in images or tokens
            "unit": "tokens" if task.is_language else "images",
            "left": gap["value"],
            "left_stderr": gap["stderr"],
            "right": square / (predictions * task.num_parameters),
            "right_stderr": stderr / (predictions * task.num_parameters),
            "realizations": cfg.condition.num_realizations,
        }
        for sampling, size, predictions, gap in found
    ]


def constant_row(run: Run, task: TrainedTask, cfg: DictConfig, spectrum: dict[str, Any]) -> dict[str, Any]:
    """Return C by direction, from batches as in lissa-tab1, its bounds from all examples, and the paper's."""
    found = units.constants(run, task, cfg, trace=spectrum["trace"])
    bounds = constant_bounds(run, task, cfg)
    trace = spectrum["trace"] if math.isnan(bounds["trace"]) else bounds["trace"]
    return {
        "task": task.label,
        "train_loss": task.train_loss,
        "leading": max(found["leading"]),
        "random": sum(found["random"]) / len(found["random"]),
        "example": found["example"],
        "largest": found["largest"],
        "assumed": cfg.assumed_constant,
        "trace_error": spectrum["trace_stderr"] / spectrum["trace"],
        "at_least": bounds["at_least"] / trace,
        "at_most": bounds["at_most"] / trace,
    }


def summary(table: pd.DataFrame, constants: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task: slope, and C in the trace and in single directions."""
    fitted = slopes(table).set_index("task")
    return pd.DataFrame(
        {
            "task": constants.task,
            "slope": constants.task.map(fitted.slope),
            "slope s.e.": constants.task.map(fitted.slope_stderr),
            "C, trace": constants.task.map(fitted.constant),
            "C, trace s.e.": constants.task.map(fitted.constant_stderr),
            "C, leading eigenvectors": constants.leading,
            "C, random directions": constants.random,
            "C, where an example points": constants.example,
            "C at least, all examples": constants.at_least,
            "C at most, all examples": constants.at_most,
            "C assumed": constants.assumed,
            "sequence / single tokens": constants.task.map(fitted.coherence),
            "its s.e.": constants.task.map(fitted.coherence_stderr),
            "train loss": constants.train_loss,
        }
    )
