"""Table 3, compute: norms, both sketches and the two inequalities of each model."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from experiments.lissa.printed import MODELS, paper_numbers
from experiments.lissa.tab3.gradients import gradient_pairs
from experiments.shared import spectrum as units
from experiments.shared.task import Task, TrainedTask


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task; `sketches`, for each repetition; `gradients`, for each pair.

    And `paper`, one row for each printed row, and `summary`, in the paper's columns.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: the settings of the units, `spectrum`, `sketch`, `frobenius`,
            `repeated` (num_products null: no repetitions), `gradients`.
    """
    rows, repeated, pairs = [], [], []
    for name, own in task_settings(cfg).items():
        task = Task.load(run, name, own).trained()
        rows.append(row(run, task, own))
        repeated += repeated_sketches(run, task, own)
        found = {key: value.double().numpy() for key, value in gradient_pairs(run, task, own).items()}
        pairs.append(pd.DataFrame({"task": task.label, **found}))
    table, gradients = pd.DataFrame(rows), pd.concat(pairs, ignore_index=True)
    columns = ["task", "form", "rows", "repetition", "value", "lambda_max"]
    sketches = pd.DataFrame(repeated, columns=columns)
    run.note(seeds=[cfg.seed])
    return {
        "table": table,
        "sketches": sketches,
        "gradients": gradients,
        "paper": paper_table(),
        "summary": summary(table, sketches, gradients),
    }


def row(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 3 has about one model, both sketches, and the two inequalities."""
    spectrum = units.spectrum(run, task, cfg)
    num_tensors = len(task.tensor_sizes)
    chunk_size = cfg.sketch.get("chunk_size", units.SKETCH_CHUNK)
    dense = units.sketch(run, task, size=cfg.sketch.size, chunk_size=chunk_size)
    size = math.ceil(cfg.sketch.size / num_tensors)
    per_tensor = units.sketch(run, task, size=size, per_tensor=True, chunk_size=chunk_size)
    pairs = cfg.frobenius
    norm = units.frobenius(run, task, num_pairs=pairs.num_pairs, batch_size=pairs.batch_size)
    columns = pairs.get("chunk_size", units.TRACE_CHUNK)
    full = units.frobenius(run, task, num_pairs=pairs.num_probes, batch_size=None, chunk_size=columns)
    trace, largest = spectrum["trace"], spectrum["largest_eigenvalue"]
    return {
        "task": task.label,
        "unit": "tokens" if task.is_language else "images",
        "parameters": task.num_parameters,
        "tensors": num_tensors,
        "examples": task.num_train,
        "trace": trace,
        "trace_stderr": spectrum["trace_stderr"],
        "frobenius": norm["value"],
        "frobenius_stderr": norm["stderr"],
        "pairs": pairs.num_pairs,
        "examples_per_batch": pairs.batch_size,
        "frobenius_full": full["value"],
        "frobenius_full_stderr": full["stderr"],
        "lambda_max": largest,
        "lambda_max_error": spectrum["largest_eigenvalue_error"],
        **{f"dense_{name}": value for name, value in dense.items()},
        **{f"per_tensor_{name}": value for name, value in per_tensor.items()},
        "squared_ratio": (full["value"] / largest) ** 2,
        "norm_over_trace": full["value"] / trace,
        "square_over_product": full["value"] ** 2 / (largest * trace),
        "batch_norm_over_trace": norm["value"] / trace,
        "batch_square_over_product": norm["value"] ** 2 / (largest * trace),
    }


def repeated_sketches(run: Run, task: TrainedTask, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return one row for each sketch: dense and per-tensor with equally many products, several of each."""
    if cfg.repeated.num_products is None:
        return []
    largest = units.spectrum(run, task, cfg)["largest_eigenvalue"]
    num_tensors = len(task.tensor_sizes)
    sizes = {"dense": cfg.repeated.num_products, "per tensor": math.ceil(cfg.repeated.num_products / num_tensors)}
    rows = []
    repetitions = range(1, cfg.repeated.num_repetitions + 1)
    for form, size in sizes.items():
        for repetition in run.progress(repetitions, f"{form} sketches {task.label}"):
            found = units.sketch(run, task, size=size, per_tensor=form == "per tensor", repetition=repetition)
            place = {"task": task.label, "form": form, "rows": found["rows"], "repetition": repetition}
            rows.append({**place, "value": found["value"], "lambda_max": largest})
    return rows


def paper_table() -> pd.DataFrame:
    """Return the paper's Table 3 beside tr and λmax of Table 1, and the two inequalities."""
    numbers = paper_numbers()
    rows = []
    for name in MODELS:
        norm = numbers.get("Table 3", name, "frobenius_norm").value
        largest = numbers.get("Table 3", name, "lambda_max").value
        size = numbers.get("Table 1", name, "num_parameters").value
        trace = size * numbers.get("Table 1", name, "trace_per_parameter").value
        rows.append(
            {
                "row": name,
                "trace": trace,
                "frobenius": norm,
                "lambda_max": largest,
                "squared_ratio": numbers.get("Table 3", name, "squared_ratio").value,
                "norm_over_trace": norm / trace,
                "square_over_product": norm**2 / (largest * trace),
                "error_over_lambda_max": norm
                / numbers.get("Table 3", "all", "sketch_size").value ** 0.5
                / largest,
            }
        )
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame, sketches: pd.DataFrame, gradients: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the paper's table, both sketches, and the checks."""
    found = pd.DataFrame(
        {
            "task": table.task,
            "‖G‖_F, two batches": table.frobenius,
            "s.e.": table.frobenius_stderr,
            "‖G‖_F, all data": table.frobenius_full,
            "s.e. of it": table.frobenius_full_stderr,
            "lambda_max, Lanczos": table.lambda_max,
            "dense sketch": table.dense_value,
            "rows": table.dense_rows,
            "per-tensor sketch": table.per_tensor_value,
            "rows of it": table.per_tensor_rows,
            "(‖G‖_F / lambda_max)²": table.squared_ratio,
            "‖G‖_F / tr": table.norm_over_trace,
            "‖G‖_F² / (lambda_max tr)": table.square_over_product,
        }
    )
    for form in ("dense", "per tensor"):
        own = sketches[sketches.form == form]
        relative = (own.value / own.lambda_max - 1).groupby(own.task)
        found[f"bias, {form}"] = table.task.map(relative.mean())
        found[f"spread, {form}"] = table.task.map(relative.std())
    ratios = (gradients.per_tensor_exact / gradients.dense_exact).groupby(gradients.task).mean()
    return found.assign(**{"variance per tensor / dense": table.task.map(ratios), "1 / L": 1 / table.tensors})
