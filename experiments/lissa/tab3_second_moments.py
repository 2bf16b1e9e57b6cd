"""Frobenius norm, and the largest eigenvalue by sketches and by Lanczos (Klochkov & Liu 2024, Table 3, App. C).

make lissa-tab3 PRESET=smoke|embedded|laptop|paper ARGS="data=mnist model=lenet also=null"

For each model: ‖G‖_F from pairs of products with two independent batches (App. C) and from products with all the
data, lambda_max from a dense Gaussian sketch and from the per-tensor ("concatenated") one with about as many rows,
by Lanczos with an error bound, and the squared ratio. For some models both sketches are repeated, which gives
their bias and spread. The paper's claim that concatenation reduces the variance of a sketched dot product is
checked on the gradients it is about. It saves random numbers, not products: the per-tensor sketch takes L d
products with G, and a dense one with L d rows has at most its variance.

A symmetric positive semi-definite matrix has ‖G‖_F <= tr(G) and ‖G‖_F² <= lambda_max tr(G). Every row of ours is
checked, and the paper's own: both ResNets break both (‖G‖_F of 2.55e4 and 2.67e4 against traces of 1.45e4 and
2.04e4 from Table 1), because the code froze different parameters for the two numbers. Which parameters ours
refer to, and which examples: see lissa-tab1, whose rows these are.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import load_paper_numbers, save_claims
from curvlab.runs import Run
from experiments.lissa import spectrum_units as units
from experiments.lissa.tab3_claims import judge_claims
from experiments.lissa.tab3_gradients import gradient_pairs
from experiments.lissa.tab3_plot import draw
from experiments.papers import FOLDER as PAPERS
from experiments.task import Task

SHARED = ("spectrum", "sketch", "frobenius", "repeated", "gradients")
PAPER_ROWS = ("ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral")


@runs.main("lissa/tab3_second_moments")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="tab3", title="Second moments, sketches") as run:
        rows, repeated, pairs = [], [], []
        for part in units.parts(cfg, SHARED):
            task = units.build(run, part)
            rows.append(row(run, task, part))
            repeated += repetitions(run, task, part)
            pairs.append(pd.DataFrame({"task": task.name, **_plain(gradient_pairs(run, task, part))}))
        table = pd.read_csv(run.save_table(pd.DataFrame(rows)))
        columns = ["task", "form", "rows", "repetition", "value", "lambda_max"]
        sketches = pd.read_csv(run.save_table(pd.DataFrame(repeated, columns=columns), "sketches.csv"))
        gradients = pd.read_csv(run.save_table(pd.concat(pairs, ignore_index=True), "gradients.csv"))
        paper = pd.read_csv(run.save_table(paper_table(), "paper.csv"))
        run.save_table(summary(table, sketches, gradients), "summary.csv")
        save_claims(run.folder, judge_claims(table, sketches, gradients, paper))
        for name, figure in draw(table, sketches, gradients, paper).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(table), seeds=[cfg.seed])


def row(run: Run, task: Task, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 3 has about one model, both sketches, and the two inequalities."""
    spectrum = units.spectrum(run, task, cfg)
    num_tensors = len(units.tensor_sizes(task))
    dense = units.sketch(run, task, size=cfg.sketch.size)
    per_tensor = units.sketch(run, task, size=math.ceil(cfg.sketch.size / num_tensors), per_tensor=True)
    pairs = cfg.frobenius
    norm = units.frobenius(run, task, num_pairs=pairs.num_pairs, batch_size=pairs.batch_size)
    full = units.frobenius(run, task, num_pairs=pairs.num_probes, batch_size=None)
    trace, largest = spectrum["trace"], spectrum["largest_eigenvalue"]
    return {
        "task": task.name,
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


def repetitions(run: Run, task: Task, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return one row a sketch: dense and per-tensor with equally many products, several of each."""
    if cfg.repeated.num_products is None:
        return []
    largest = units.spectrum(run, task, cfg)["largest_eigenvalue"]
    num_tensors = len(units.tensor_sizes(task))
    sizes = {"dense": cfg.repeated.num_products, "per tensor": math.ceil(cfg.repeated.num_products / num_tensors)}
    rows = []
    for form, size in sizes.items():
        for repetition in run.progress(range(1, cfg.repeated.num_repetitions + 1), f"{form} sketches {task.name}"):
            found = units.sketch(run, task, size=size, per_tensor=form == "per tensor", repetition=repetition)
            place = {"task": task.name, "form": form, "rows": found["rows"], "repetition": repetition}
            rows.append({**place, "value": found["value"], "lambda_max": largest})
    return rows


def paper_table() -> pd.DataFrame:
    """Return the paper's Table 3 beside tr and λmax of Table 1, and the two inequalities."""
    numbers = load_paper_numbers("lissa", folder=PAPERS)
    rows = []
    for name in PAPER_ROWS:
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


def _plain(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double().numpy() for name, value in entries.items() if isinstance(value, torch.Tensor)}


def _scale(table: pd.DataFrame) -> dict[str, Any]:
    return {
        "models": {"ours": ", ".join(table.task), "paper": ", ".join(PAPER_ROWS)},
        "rows of the sketch": {"ours": table.dense_rows.tolist(), "paper": 5000},
        "examples": {"ours": table.examples.tolist(), "paper": "5000 images, 50 x 256 tokens a product, sampled"},
        "pairs of products for ‖G‖_F": {"ours": table.pairs.tolist(), "paper": "not stated"},
    }


if __name__ == "__main__":
    main()
