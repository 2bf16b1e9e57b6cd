"""Trace, largest eigenvalue and the hyperparameters they recommend (Klochkov & Liu 2024, Table 1).

make lissa-tab1 PRESET=smoke|embedded|laptop|paper ARGS="data=mnist model=lenet also=null"

For each model: tr(G)/P ± standard error from quadratic forms with a new batch for each normal vector, without a
backward pass (the paper: 1,600 of them), lambda_max from a Gaussian sketch, and step size, batch size and number
of steps by Corollary 1 with C = 2. Beside them what the paper does not have: the trace from products with all the
data, lambda_max by Lanczos with an error bound (the recommendation uses this one), C of condition C.1 measured in
several directions, and the batch size that follows from it.

Which parameters: those that `freeze` leaves (all; for the ResNets without batch norm and biases), in eval() mode.
G is the mean over `curvature_train` training images, or over all predicted tokens of as many sequences; the
paper's N, its number of parameters, is our P. |B| counts images or tokens. `damping` is 5/270 of lambda_max, as
for the paper's ResNet-18, because its lambda = 5 means nothing at another scale. The table's own arithmetic is
checked too: 2 tr / lambda_max for ResNet-50 is 87, the table prints 5.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import load_paper_numbers, save_claims
from curvlab.runs import Run
from curvlab.solvers import lissa_hyperparameters
from experiments.lissa import spectrum_units as units
from experiments.lissa.tab1_claims import judge_claims
from experiments.lissa.tab1_plot import draw
from experiments.papers import FOLDER as PAPERS
from experiments.task import Task

SHARED = ("damping", "damping_ratio", "assumed_constant", "spectrum", "forms", "sketch", "constant")
PAPER_ROWS = ("ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral")


@runs.main("lissa/tab1_hyperparameters")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="tab1", title="Statistics and hyperparameters") as run:
        rows = []
        for part in units.parts(cfg, SHARED):
            task = units.build(run, part)
            rows.append(row(run, task, part))
        table = pd.read_csv(run.save_table(pd.DataFrame(rows)))
        paper = pd.read_csv(run.save_table(paper_table(), "paper.csv"))
        run.save_table(summary(table), "summary.csv")
        save_claims(run.folder, judge_claims(table, paper))
        for name, figure in draw(table, paper).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(table), seeds=[cfg.seed])


def row(run: Run, task: Task, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 1 has about one model, and what it assumes."""
    spectrum = units.spectrum(run, task, cfg)
    forms = units.trace_by_forms(run, task, cfg)
    sketch = units.sketch(run, task, size=cfg.sketch.size)
    constants = units.constants(run, task, cfg, trace=spectrum["trace"])
    largest, size = spectrum["largest_eigenvalue"], task.num_parameters
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * largest
    settings = {"trace": spectrum["trace"], "largest_eigenvalue": largest, "damping": damping}
    assumed = lissa_hyperparameters(**settings, constant=cfg.assumed_constant)
    measured = lissa_hyperparameters(**settings, constant=max(constants["largest"], 1.0))
    per_example = units.predictions_per_example(task)
    return {
        "task": task.name,
        "unit": "tokens" if units.is_language(task) else "images",
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
    }


def paper_table() -> pd.DataFrame:
    """Return the paper's Table 1 with what its rows imply: tr, and what follows from trace and lambda_max."""
    numbers = load_paper_numbers("lissa", folder=PAPERS)
    damping = numbers.get("Table 1", "all", "damping").value
    rows = []
    for name in PAPER_ROWS:
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
            "batch size with it": table.batch_size_measured,
            "counted in": table.unit,
        }
    )


def _scale(table: pd.DataFrame) -> dict[str, Any]:
    return {
        "models": {"ours": ", ".join(table.task), "paper": ", ".join(PAPER_ROWS)},
        "examples": {"ours": table.examples.tolist(), "paper": "sampled from ImageNet, OpenWebText2"},
        "quadratic forms": {"ours": table.forms.tolist(), "paper": 1600},
        "rows of the sketch": {"ours": table.sketch_size.tolist(), "paper": 5000},
        "damping": {"ours": [round(value, 6) for value in table.damping], "paper": 5.0},
    }


if __name__ == "__main__":
    main()
