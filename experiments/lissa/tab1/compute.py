"""Table 1, compute: what it has about each model, and what it assumes."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from curvlab.solvers import lissa_hyperparameters
from experiments.lissa.printed import MODELS, paper_numbers
from experiments.shared import spectrum as units
from experiments.shared.constant_bounds import constant_bounds
from experiments.shared.task import Task, TrainedTask


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task; `paper`, one for each printed row; `summary`, in the paper's columns.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `damping` or `damping_ratio`, `assumed_constant` (C), and the
            settings of the units: `spectrum`, `forms`, `sketch`, `constant`. With C measured |B| is
            2 C tr / lambda_max, C at least 1: `batch_size_measured`.
    """
    rows = [row(run, Task.load(run, name, own).trained(), own) for name, own in task_settings(cfg).items()]
    table = pd.DataFrame(rows)
    run.note(seeds=[cfg.seed])
    return {"table": table, "paper": paper_table(), "summary": summary(table)}


def row(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 1 has about one model, and what it assumes."""
    spectrum = units.spectrum(run, task, cfg)
    forms = units.trace_by_forms(run, task, cfg)
    sketch = units.sketch(run, task, **cfg.sketch)
    constants = units.constants(run, task, cfg, trace=spectrum["trace"])
    bounds = constant_bounds(run, task, cfg)
    largest, size = spectrum["largest_eigenvalue"], task.num_parameters
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * largest
    settings = {"trace": spectrum["trace"], "largest_eigenvalue": largest, "damping": damping}
    assumed = lissa_hyperparameters(**settings, constant=cfg.assumed_constant)
    # As lissa-fig1 and Lissa.auto take it: twice what is measured, a lower bound of the C that is needed.
    measured = lissa_hyperparameters(**settings, constant=2 * max(constants["largest"], 1.0))
    trace = spectrum["trace"] if math.isnan(bounds["trace"]) else bounds["trace"]
    per_example = task.predictions_per_example
    return {
        "task": task.label,
        "unit": "tokens" if task.is_language else "images",
        "parameters": size,
        "examples": task.num_train,
        "per_example": per_example,  # predictions: 1, or tokens of a sequence
        "train_loss": task.train_loss,
        "trace_per_parameter": forms["value"],
        "trace_per_parameter_stderr": forms["stderr"],
        "forms": cfg.forms.num_probes,
        "examples_per_form": cfg.forms.batch_size,
        "full_trace_per_parameter": spectrum["trace"] / size,
        "full_trace_per_parameter_stderr": spectrum["trace_stderr"] / size,
        "trace": spectrum["trace"],
        "trace_stderr": spectrum["trace_stderr"],
        "lambda_max_sketch": sketch["value"],
        "lambda_max_sketch_stderr": sketch["stderr"],
        "sketch_size": cfg.sketch.size,
        "lambda_max": largest,
        "lambda_max_error": spectrum["largest_eigenvalue_error"],
        "damping": damping,
        "step_size": assumed.step_size,
        "batch_size": assumed.batch_size,
        "num_steps": assumed.num_steps,
        "assumed_constant": cfg.assumed_constant,
        "constant_leading": max(constants["leading"]),
        "constant_random": sum(constants["random"]) / len(constants["random"]),
        "constant_example": constants["example"],
        "constant": constants["largest"],
        "batch_size_measured": measured.batch_size,
        "exact_trace": bounds["trace"],  # nan where only estimates are to be had
        # From all examples one by one: C of condition C.1, and Theorem 1's C tr / lambda_max, between two bounds.
        "constant_at_least": bounds["at_least"] / trace,
        "constant_at_most": bounds["at_most"] / trace,
        "needed_at_least": bounds["at_least"] / largest,
        "needed_at_most": bounds["at_most"] / largest,
    }


def paper_table() -> pd.DataFrame:
    """Return the paper's Table 1 with what its rows imply: tr, and what follows from trace and lambda_max."""
    numbers = paper_numbers()
    damping = numbers.get("Table 1", "all", "damping").value
    rows = []
    for name in MODELS:
        printed = {n.column: n for n in numbers.in_table("Table 1") if n.row == name}
        size, per_parameter = printed["num_parameters"].value, printed["trace_per_parameter"]
        largest = printed["lambda_max"].value
        implied = lissa_hyperparameters(
            trace=size * per_parameter.value, largest_eigenvalue=largest, damping=damping, constant=2.0
        )
        rows.append(
            {
                "row": name,
                "parameters": size,
                "trace_per_parameter": per_parameter.value,
                "trace_per_parameter_stderr": per_parameter.stderr,
                "lambda_max": largest,
                "trace": size * per_parameter.value,
                "step_size": printed["step_size"].value,
                "step_size_implied": implied.step_size,
                "batch_size": printed["batch_size"].value,
                "batch_size_implied": implied.batch_size,
                "damping": damping,
                "num_steps": printed["num_steps"].value,
                "num_steps_implied": math.ceil(2 / (printed["step_size"].value * damping)),
            }
        )
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the paper's table, with ours beside them."""
    return pd.DataFrame(
        {
            "task": table.task,
            "P": table.parameters,
            "tr(G)/P": table.trace_per_parameter,
            "s.e.": table.trace_per_parameter_stderr,
            "tr(G)/P, all data": table.full_trace_per_parameter,
            "s.e. of it": table.full_trace_per_parameter_stderr,
            "lambda_max, sketch": table.lambda_max_sketch,
            "d": table.sketch_size,
            "lambda_max, Lanczos": table.lambda_max,
            "step size": table.step_size,
            "batch size": table.batch_size,
            "steps": table.num_steps,
            "C measured": table.constant,
            "batch size with twice it": table.batch_size_measured,
            "C at least": table.constant_at_least,
            "C at most": table.constant_at_most,
            "C tr / lambda_max at least": table.needed_at_least,
            "C tr / lambda_max at most": table.needed_at_most,
            "tr(G)/P, exact": table.exact_trace / table.parameters,
            "counted in": table.unit,
        }
    )
