"""Both sides of condition C.1 against the batch size (Klochkov & Liu 2024, Fig. 4, App. B.3).

make lissa-fig4 PRESET=smoke|embedded|laptop|paper ARGS="data=mnist model=lenet also=null"

The condition is E G̃² - G² ⪯ C tr(G) G / |B|. As in the paper, the traces of both sides, over P, from random
quadratic forms, for four batch sizes a model; here with standard errors, a fitted log-log slope, and for language
models |B| in tokens. For batches drawn with replacement the left side is (E G_i² - G²) / |B|, G_i of one example:
the slope -1 is an identity, of images and sequences alike, and says nothing about C. What can fail is the level,
and with it the constant: in the trace, which averages over all directions, and in single directions, where the
condition must hold too and C is measured as in lissa-tab1 (a lower bound). For language models also batches of
independent tokens, so that what the tokens of one sequence have in common (B.3: incoherence) shows.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.lissa import spectrum_units as units
from experiments.lissa.fig4_claims import judge_claims, slopes
from experiments.lissa.fig4_plot import draw
from experiments.lissa.fig4_traces import sampling_gap, token_gap
from experiments.task import Task

SHARED = ("assumed_constant", "spectrum", "condition", "constant")


@runs.main("lissa/fig4_condition")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="fig4", title="Condition C.1") as run:
        rows, constants = [], []
        for part in units.parts(cfg, SHARED):
            task = units.build(run, part)
            spectrum = units.spectrum(run, task, part)
            rows += traces(run, task, part, spectrum)
            constants.append(constant_row(run, task, part, spectrum))
        table = pd.read_csv(run.save_table(pd.DataFrame(rows)))
        measured = pd.read_csv(run.save_table(pd.DataFrame(constants), "constants.csv"))
        run.save_table(summary(table, measured), "summary.csv")
        save_claims(run.folder, judge_claims(table, measured))
        for name, figure in draw(table, measured).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(table), seeds=[cfg.seed])


def traces(run: Run, task: Task, cfg: DictConfig, spectrum: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a batch size: traces of both sides over P (the right one with C = 1), standard errors."""
    per_example = units.predictions_per_example(task)
    # tr² without the bias of squaring an estimate; its error to first order.
    square = spectrum["trace"] ** 2 - spectrum["trace_stderr"] ** 2
    stderr = 2 * spectrum["trace"] * spectrum["trace_stderr"]
    found = [
        ("examples", size, size * per_example, sampling_gap(run, task, cfg, batch_size=size))
        for size in cfg.condition.batch_sizes
    ]
    if units.is_language(task) and cfg.condition.token_batch is not None:
        size = cfg.condition.token_batch
        found.append(("single tokens", size, float(size), token_gap(run, task, cfg)))
    return [
        {
            "task": task.name,
            "sampling": sampling,
            "examples": size,
            "batch_size": predictions,  # |B|, in images or tokens
            "unit": "tokens" if units.is_language(task) else "images",
            "left": gap["value"],
            "left_stderr": gap["stderr"],
            "right": square / (predictions * task.num_parameters),
            "right_stderr": stderr / (predictions * task.num_parameters),
            "realizations": cfg.condition.num_realizations,
        }
        for sampling, size, predictions, gap in found
    ]


def constant_row(run: Run, task: Task, cfg: DictConfig, spectrum: dict[str, Any]) -> dict[str, Any]:
    """Return C by direction, beside the paper's."""
    found = units.constants(run, task, cfg, trace=spectrum["trace"])
    return {
        "task": task.name,
        "train_loss": task.train_loss,
        "leading": max(found["leading"]),
        "random": sum(found["random"]) / len(found["random"]),
        "example": found["example"],
        "largest": found["largest"],
        "assumed": cfg.assumed_constant,
        "trace_error": spectrum["trace_stderr"] / spectrum["trace"],
    }


def summary(table: pd.DataFrame, constants: pd.DataFrame) -> pd.DataFrame:
    """Return one row a model: slope, and C in the trace and in single directions."""
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
            "C assumed": constants.assumed,
            "sequence / single tokens": constants.task.map(fitted.coherence),
            "its s.e.": constants.task.map(fitted.coherence_stderr),
            "train loss": constants.train_loss,
        }
    )


def _scale(table: pd.DataFrame) -> dict[str, Any]:
    names = list(dict.fromkeys(table.task))
    sizes = {name: table[table.task == name].batch_size.round().astype(int).tolist() for name in names}
    return {
        "models": {"ours": ", ".join(names), "paper": "ResNet-18, ResNet-50, OPT-1.3B"},
        "batch sizes": {"ours": str(sizes), "paper": "four a model, not stated"},
        "realizations": {"ours": table.groupby("task", sort=False).realizations.first().tolist(), "paper": 1000},
    }


if __name__ == "__main__":
    main()
