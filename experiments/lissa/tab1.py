"""Trace, largest eigenvalue and the hyperparameters they recommend (Klochkov & Liu 2024, Table 1).

make lissa-tab1 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

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
from functools import cache
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, PaperNumbers, Run, Target, load_paper_numbers, panels, plots
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, Interval, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.names import reader_names
from curvlab.solvers import lissa_hyperparameters
from experiments.lissa import sketches
from experiments.lissa.constant_bounds import UNSATURATED_LOSS, constant_bounds
from experiments.papers import FOLDER
from experiments.shared import spectrum as units
from experiments.shared.task import Task, TrainedTask
from experiments.shared.worst_case import farthest_ratio, judge_row, largest

TARGET = Target(
    __name__,
    title="Trace, largest eigenvalue and the hyperparameters they recommend",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B", "Llama-7B", "Mistral-7B"],
        "table.csv:examples": "sampled from ImageNet, OpenWebText2",
        "forms.num_probes": 1600,
        "sketch.size": 5000,
        "table.csv:damping": 5.0,
        "assumed_constant": 2.0,
    },
)
MODELS = ("ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral")  # rows of Tables 1 and 3


@cache
def paper_numbers() -> PaperNumbers:
    """Return the paper's numbers."""
    return load_paper_numbers("lissa", folder=FOLDER)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task; `paper`, one for each printed row; `summary`, in the paper's columns.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `damping` or `damping_ratio`, `assumed_constant` (C), and the
            settings of the units: `spectrum`, `forms`, `sketch`, `constant`. With C measured |B| is
            2 C tr / lambda_max, C at least 1: `batch_size_measured`.
    """
    rows = [row(run, task.trained(), task.settings) for task in Task.each(run, cfg)]
    table = pd.DataFrame(rows)
    run.note(seeds=[cfg.seed])
    return {"table": table, "paper": paper_table(), "summary": summary(table)}


def row(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 1 has about one model, and what it assumes."""
    spectrum = units.spectrum(task, cfg)
    forms = sketches.trace_by_forms(task, **cfg.forms)
    sketch = sketches.sketch(task, **cfg.sketch)
    constants = units.constants(task, **cfg.constant, trace=spectrum["trace"])
    bounds = constant_bounds(task, num_leading=cfg.constant.num_leading, num_random=cfg.constant.num_random)
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


# ------------------------------------------------------------------------------------ judge
BOUNDS = (
    "The lower bound is that of the directions tried, the upper one max_i tr(G_i) where traces are exact, else "
    "max_i λmax(G_i), both from all examples one by one; between them the condition is not decided. By model: "
    "{0}_at_least and {0}_at_most in table.csv."
)
SUFFICIENT = (
    "The condition is sufficient: that C = 2 breaks it does not say that LiSSA diverges. Whether it converges is "
    "measured in lissa-fig1 (recipe-converges) and lissa-fig2."
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the forms, what lies between bounds, and the printed steps; the other claims say their value."""
    table, paper = computed["table"], computed["paper"]
    least, most = table.needed_at_least, table.needed_at_most
    ratios = paper.num_steps * paper.step_size * paper.damping / 2
    listed = ", ".join(f"{row} {ratio:.3g}" for row, ratio in zip(paper["row"], ratios, strict=True))
    place = farthest_ratio(ratios)
    return [
        _unbiased(claims.claim("trace-unbiased"), table),
        _between(claims.claim("batch-above-one"), least.min(), most.min()),
        _between(claims.claim("requirement-mild-measured"), least.max(), most.max()),
        _constant(claims.claim("constant-two"), table[table.train_loss >= UNSATURATED_LOSS]),
        _constant(claims.claim("constant-two-saturated"), table[table.train_loss < UNSATURATED_LOSS]),
        judge_row(
            claims.claim("printed-steps"),
            paper,
            ratios,
            place,
            f"{paper['row'].iloc[place]}, printed",
            f"By row: {listed}. More steps than the formula's do no harm.",
        ),
    ]


def _constant(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    if table.empty:
        return out_of_reach(claim, "No network of such a training loss among the tasks of this run.")
    above = int((table.constant_at_least > table.assumed_constant).sum())
    cases = f"It is above the constant assumed on {above} of {len(table)} such networks."
    return _between(claim, table.constant_at_least.max(), table.constant_at_most.max(), "constant", cases)


def _between(claim: Claim, low: float, high: float, column: str = "needed", cases: str = "") -> ClaimResult:
    """Judge a lower bound, with the interval from it to the upper bound (infinite where there is none)."""
    kind = "largest of the directions tried, to what is enough, of all examples"
    interval = Interval(float(low), float(high), kind, 1)
    why = f"{cases} {BOUNDS.format(column)} {SUFFICIENT if column == 'constant' else ''}".strip()
    return judge_claim(claim, float(low), interval, if_not_reproduced=why)


def _unbiased(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge forms over the trace, exact where it is to be had, by the model whose 95 % reach farthest from 1."""
    known = table.exact_trace.notna()
    full = (table.exact_trace / table.parameters).where(known, table.full_trace_per_parameter)
    error = table.full_trace_per_parameter_stderr.where(~known, 0.0)
    ratio = table.trace_per_parameter / full
    forms = table.trace_per_parameter_stderr / table.trace_per_parameter
    half = 1.96 * ratio * (forms**2 + (error / full) ** 2) ** 0.5
    worst = largest((ratio - 1).abs() + half)
    value, wide, task = float(ratio.iloc[worst]), float(half.iloc[worst]), table.task.iloc[worst]
    count = int(table.forms.iloc[worst])
    interval = Interval(value - wide, value + wide, f"95 % of both errors, {count} forms, {task}", count)
    why = f"It is {task} whose interval reaches the farthest from 1: more forms will tell."
    return judge_claim(claim, value, interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return C and the batch size against what the paper takes, and Table 1: ours above the paper's rows."""
    table, paper = computed["table"].sort_values("train_loss", ascending=False), computed["paper"]
    losses = table.task.map(reader_names(table.task, whole=True)) + table.train_loss.map(
        "\n(training loss {:.2g})".format
    )
    table, paper = table.assign(task=losses), paper.assign(task=paper["row"] + " (the paper)")
    return {"figure.png": _batch_size(table), "figure_more.png": _table_1(table, paper)}


def _batch_size(table: pd.DataFrame) -> Figure:
    """Draw where C lies, and the batch size that it asks for, each beside that of the paper's C."""
    known = table[table.constant_at_least.notna()]
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 0.5 * len(known) + 1.4), sharey=True)
    ranges = {"constant": "assumed_constant", "needed": "batch_size"}
    for ax, (of, paper) in zip(axes[0], ranges.items(), strict=True):
        ends: Any = {"low": f"{of}_at_least", "high": f"{of}_at_most"}
        ends |= {"label": "measured: from the worst direction tried (dot) to what is enough (end)"}
        ends |= {"paper_label": "with C = 2, the paper's"}
        panels.forest(ax, known, name="task", value=ends["low"], paper=paper, **ends)
    panels.frame(axes[0, 0], x="C of condition C.1", log="x")
    panels.frame(axes[0, 1], x="batch size C tr(G) / λmax that it asks for", log="x")
    panels.legend(figure, title="one network a row; the bar is where C lies, not an interval over seeds")
    return figure


def _table_1(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    shown: dict[str, dict[str, tuple[pd.DataFrame, str]]] = {
        "tr(G) / P": {
            "forms by forward passes, 95 %": (table, "trace_per_parameter"),
            "products with all the data": (table, "full_trace_per_parameter"),
            "printed, 95 %": (paper, "trace_per_parameter"),
        },
        "λmax(G)": {
            "sketch, 95 %": (table, "lambda_max_sketch"),
            "Lanczos": (table, "lambda_max"),
            "printed (sketch)": (paper, "lambda_max"),
        },
        "|B|, images or tokens": {
            "2 tr / λmax": (table, "batch_size"),
            "twice C tr / λmax, C measured": (table, "batch_size_measured"),
            "printed": (paper, "batch_size"),
            "2 tr / λmax of the printed row": (paper, "batch_size_implied"),
        },
    }
    figure, axes = plots.figure(1, 3, panel_size=(2.7, 0.36 * (len(table) + len(paper)) + 1.5), sharey=True)
    for ax, (quantity, parts) in zip(axes[0], shown.items(), strict=True):
        points = pd.concat([_points(own, column, label) for label, (own, column) in parts.items()])
        panels.forest(ax, points, name="task", value="value", low="low", high="high", by="label")
        ax.axhline(len(table) - 0.5, color="#999999", linewidth=0.8)
        panels.frame(ax, x=quantity, log="x")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    return figure


def _points(own: pd.DataFrame, column: str, label: str) -> pd.DataFrame:
    """Return the column as points with their 95 %, 1.96 standard errors, where it has any."""
    half = 1.96 * own[f"{column}_stderr"].fillna(0) if f"{column}_stderr" in own else 0.0
    values = own[column]
    return pd.DataFrame(
        {"task": own.task, "label": label, "value": values, "low": values - half, "high": values + half}
    )
