"""Both sides of condition C.1 against the batch size (Klochkov & Liu 2024, Fig. 4, App. B.3).

make lissa-fig4 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

The condition is E G̃² - G² ⪯ C tr(G) G / |B|. As in the paper, the traces of both sides, over P, from random
quadratic forms, for four batch sizes and each model; here with standard errors, a fitted log-log slope, and for
language models |B| in tokens. For batches drawn with replacement the left side is (E G_i² - G²) / |B|, G_i of one
example: the slope -1 is an identity, of images and sequences alike, and says nothing about C. What can fail is the
level, and with it the constant: in the trace, which averages over all directions, and in single directions, where
the condition must hold too and C is measured as in lissa-tab1 (a lower bound). For language models also batches of
independent tokens, so that what the tokens of one sequence have in common (B.3: incoherence) shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from omegaconf import DictConfig

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, Interval, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.data.tokens import IGNORED
from curvlab.lab.names import reader_names
from curvlab.linalg import LinearOperator
from experiments.lissa.constant_bounds import constant_bounds
from experiments.shared import spectrum as units
from experiments.shared.spectrum import SEQUENCES_AT_A_TIME, gauss_newton
from experiments.shared.task import Task, TrainedTask
from experiments.shared.worst_case import largest

TARGET = Target(
    __name__,
    title="Both sides of condition C.1 against the batch size",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B"],
        "condition.batch_sizes": "four for each model, not stated",
        "condition.num_realizations": 1000,
        "assumed_constant": 2.0,
    },
    after=("lissa/tab1",),
)
C_ONE, C_TWO = "right side of C.1, C = 1 (band: 95 %)", "right side of C.1, C = 2 (the paper's)"


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each batch size; `constants` and `summary`, one for each task.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `condition`, `assumed_constant` (C), and the settings of the
            units that are shared: `spectrum`, `constant`.
    """
    rows, constants = [], []
    for loaded in Task.each(run, cfg):
        task, own = loaded.trained(), loaded.settings
        spectrum = units.spectrum(task, own)
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
    settings = task.key | {"num_realizations": cfg.condition.num_realizations}
    found = [
        ("examples", size, size * per_example, sampling_gap(run, task, **settings, batch_size=size))
        for size in cfg.condition.batch_sizes
    ]
    if task.is_language and cfg.condition.token_batch is not None:
        size = cfg.condition.token_batch
        found.append(("single tokens", size, float(size), token_gap(run, task, **settings, token_batch=size)))
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
    found = units.constants(task, **cfg.constant, trace=spectrum["trace"])
    bounds = constant_bounds(task, num_leading=cfg.constant.num_leading, num_random=cfg.constant.num_random)
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


@unit("lissa/sampling_gap", version=1, about="gap of batches, |B| = {batch_size}")
def sampling_gap(
    run: Run, task: TrainedTask, /, *, batch_size: int, num_realizations: int, **_: Any
) -> dict[str, Any]:
    """Return tr(E G̃² - G²)/P for batches of `batch_size` examples: mean and standard error.

    E ‖G̃'g - G̃''g‖² / 2 with two independent batches for each normal vector g of variance 1/P. The paper takes
    E ‖G̃ g‖² - ‖G g‖²; the difference of two batches has the same mean and needs no product with all the data.
    """
    operator, generator = gauss_newton(task), task.generator("sampling gap", batch_size)
    return _gap(run, operator, lambda: operator.sample(batch_size, generator), num_realizations, generator)


@unit("lissa/token_gap", version=1, about="gap of single tokens")
def token_gap(
    run: Run, task: TrainedTask, /, *, token_batch: int, num_realizations: int, **_: Any
) -> dict[str, Any]:
    """Return the same for batches of single tokens: one of each of `token_batch` sequences, all else ignored.

    These are independent, which the tokens of one sequence are not: the ratio of the two gaps at the same number
    of tokens is what their coherence costs (B.3, where it is bounded by R).
    """
    operator, generator = gauss_newton(task), task.generator("token gap")
    draw = partial(_token_batch, task, token_batch, generator)
    return _gap(run, operator, draw, num_realizations, generator)


def _gap(
    run: Run, operator: LinearOperator, draw: Callable[[], LinearOperator], number: int, generator: torch.Generator
) -> dict[str, Any]:
    values = []
    for _ in run.progress(range(number), "gaps of batches"):
        pair = draw(), draw()
        vector = operator.randn(1, generator) / operator.shape[0] ** 0.5
        difference = pair[0] @ vector - pair[1] @ vector
        values.append(operator.inner(difference, difference).double().cpu()[0] / 2)
    run.add_matvecs(2 * number)
    found = torch.stack(values)
    return {"value": float(found.mean()), "stderr": float(found.std()) / number**0.5}


def _token_batch(task: TrainedTask, num: int, generator: torch.Generator) -> GaussNewtonOperator:
    """Return G̃ of `num` independent tokens, each uniform over all predicted ones (sequences of equal length)."""
    inputs, targets = task.train
    rows = torch.randint(len(targets), (num,), generator=generator)
    chosen = targets[rows]
    columns = torch.randint(chosen.shape[1], (num, 1), generator=generator).to(chosen.device)
    kept = torch.full_like(chosen, IGNORED).scatter(1, columns, chosen.gather(1, columns))
    return GaussNewtonOperator(task.model, task.loss, (inputs[rows], kept), batch_size=SEQUENCES_AT_A_TIME)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each task the log-log slope of the left side, C in the trace, and what coherence costs.

    Least squares of log left on log |B|; its standard error from those of the values. C in the trace: left over
    right at C = 1, the mean over batch sizes. Coherence: left times |B| of sequences over that of single tokens;
    nan without them. All batch sizes count alike: few realizations carry most of a heavy-tailed mean, so that a
    low one has a small standard error too, and weights by it would pull the mean down.
    """
    rows = []
    for task, own in table.groupby("task", sort=False):
        ours = own[own.sampling == "examples"]
        error = (ours.left_stderr / ours.left).to_numpy()
        slope, stderr = _slope(np.log(ours.batch_size.to_numpy()), np.log(ours.left.to_numpy()), error)
        constant, relative = _mean((ours.left / ours.right).to_numpy(), error)
        # The trace of the right side is the same estimate for all batch sizes: its error does not average out.
        relative = math.hypot(relative, float((ours.right_stderr / ours.right).iloc[0]))
        rows.append(
            {
                "task": task,
                "slope": slope,
                "slope_stderr": stderr,
                "constant": constant,
                "constant_stderr": constant * relative,
                "realizations": own.realizations.min(),
                **_coherence(own, ours),
            }
        )
    return pd.DataFrame(rows)


def _slope(x: np.ndarray, y: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    centred = x - x.mean()
    spread = (centred**2).sum()
    return float((centred * y).sum() / spread), float(np.sqrt((centred**2 * error**2).sum()) / spread)


def _mean(values: np.ndarray, relative: np.ndarray) -> tuple[float, float]:
    """Return the mean of independent values and its relative standard error."""
    error = float(np.sqrt(((values * relative) ** 2).sum())) / len(values)
    return float(values.mean()), error / float(values.mean())


def _coherence(own: pd.DataFrame, ours: pd.DataFrame) -> dict[str, float]:
    single = own[own.sampling == "single tokens"]
    if single.empty:
        return {"coherence": math.nan, "coherence_stderr": math.nan}
    error = (ours.left_stderr / ours.left).to_numpy()
    level, relative = _mean((ours.left * ours.batch_size).to_numpy(), error)
    value = level / float((single.left * single.batch_size).iloc[0])
    relative = math.hypot(relative, float((single.left_stderr / single.left).iloc[0]))
    return {"coherence": value, "coherence_stderr": value * relative}


# ------------------------------------------------------------------------------------ judge
SLOPE_WHY = "with independent examples -1 is an identity, (E G_i² - G²) / |B|; more realizations will tell."
HEAVY = "few examples carry the mean, and heavy tails make its errors too small."
TRACE_WHY = (
    "Single examples carry much more curvature than the mean: E r⁴ of the paper's derivation (B.3), which C "
    "stands for, is not near 1, least so where most examples are fitted."
)
TOKENS_WHY = "The tokens of a sequence share directions, so a batch of sequences is worth fewer tokens."


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge slopes, C in the traces and what sequences share; C by direction says its value itself."""
    fitted = slopes(computed["table"]).set_index("task")
    # The identity is judged on all tasks by the one whose 95 % reach the farthest from -1.
    place = largest((fitted.slope + 1).abs() + 1.96 * fitted.slope_stderr)
    apart = (fitted.slope + 1).abs() / fitted.slope_stderr
    missed = " and ".join(f"{task} misses it by {far:.1f}" for task, far in apart[apart > 1.96].items())
    heavy = f" {missed} standard errors: {HEAVY}" if missed else ""
    why = f"It is {fitted.index[place]}: {SLOPE_WHY}{heavy}"
    results = [_with_error(claims.claim("slope"), fitted.iloc[place], "slope", why)]
    for task, found in fitted.iterrows():
        results.append(_with_error(claims.claim("trace", of=str(task)), found, "constant", TRACE_WHY))
        if not math.isnan(found.coherence):
            results.append(_with_error(claims.claim("incoherence", of=str(task)), found, "coherence", TOKENS_WHY))
    if fitted.coherence.isna().all():
        claim = claims.claim("incoherence", of="language-models")
        results.append(out_of_reach(claim, "No language model in this run."))
    return results


def _with_error(claim: Claim, found: pd.Series, column: str, why: str) -> ClaimResult:
    value, half = found[column], 1.96 * found[f"{column}_stderr"]
    number = int(found.realizations)
    interval = Interval(value - half, value + half, f"95 % over {number} realizations", number)
    return judge_claim(claim, value, interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: traces of both sides against the batch size, a panel for each task, and C of all."""
    table = computed["table"]
    measured = computed["constants"].set_index("task").sort_values("train_loss", ascending=False)
    names = reader_names(measured.index, whole=True)
    figure, axes = plots.figure(1, len(measured) + 1, panel_size=(3.1, 3.4))
    for ax, (task, constants) in zip(axes[0], measured.iterrows(), strict=False):
        _panel(ax, table[table.task == task], constants)
        low, high = constants["at_least"], constants["at_most"]
        reach = f"C is {low:.2g} to {high:.2g}" if np.isfinite(high) else f"C is at least {low:.2g}"
        ax.set_title(f"{names[str(task)]}\nloss {constants['train_loss']:.2g}: {reach}", fontsize=9)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("trace / P")
    _constants(axes[0, -1], measured)
    panels.legend(
        figure, columns=2, title="one network a panel; condition C.1: its left side is at most its right"
    )
    return {"figure.png": figure}


def _constants(ax: Axes, measured: pd.DataFrame) -> None:
    """Draw C of each task against its training loss, from the worst direction tried to what is enough."""
    enough = measured.at_most.where(np.isfinite(measured.at_most), measured.at_least)
    ax.vlines(measured.train_loss, measured.at_least, enough, color="black", linewidth=1.2)
    for ends, marker in ((measured.at_least, "o"), (enough, "_")):
        ax.plot(measured.train_loss, ends, marker, color="black", markersize=4 if marker == "o" else 9)
    ax.axhline(measured.assumed.iloc[0], linestyle="--", color="black", linewidth=1.2)
    ax.set_title("C: worst direction tried (dot)\nto what is enough (bar)", fontsize=9)
    panels.frame(ax, x="training loss", log="xy")


def _panel(ax: Axes, own: pd.DataFrame, constants: pd.Series) -> None:
    ours, line = own[own.sampling == "examples"], {"color": "black", "marker": ""}
    worst = "right side of C.1, C of the worst direction"
    ours = ours.assign(assumed=constants["assumed"] * ours.right, worst=constants["at_least"] * ours.right)
    half = 1.96 * ours.right_stderr
    ours = ours.assign(low=(ours.right - half).clip(lower=ours.right / 100), high=ours.right + half)
    over: dict[str, Any] = {"x": "batch_size", "linewidth": 1.2}
    panels.lines(
        ax, ours, y="right", low="low", high="high", linestyle=":", label=C_ONE, styles={C_ONE: line}, **over
    )
    panels.lines(ax, ours, y="assumed", linestyle="--", label=C_TWO, styles={C_TWO: line}, **over)
    panels.lines(ax, ours, y="worst", label=worst, styles={worst: line}, **over)
    for sampling, marker, label in (
        ("examples", "D", "LiSSA's batch, left side of C.1 (95 %)"),
        ("single tokens", "s", "LiSSA's batch of independent tokens"),
    ):
        part, look = own[own.sampling == sampling], {"color": panels.COLORS["lissa"], "marker": marker}
        plots.measured(ax, part.batch_size, part.left, part.left_stderr, label=label, **look)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = sorted(own.batch_size.unique())
    ax.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"batch size |B|, {own.unit.iloc[0]}")
