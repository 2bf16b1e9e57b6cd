"""Every solver's trajectory to its residual, beside a reference, by products and by seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Computed, Run, panels, plots
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.gauges import work_clock
from experiments.benchmarks.solvers.methods import INDEPENDENT, LABELS, CountedSystems, Counter, Recorder, solve
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask

QUALITY = ["error", "error_worst", "correlation", "correlation_worst", "outcome"]
FLOOR = 1e-7  # of 1 - correlation: below it is rounding of the reference


def compute(run: Run, tasks: Iterable[tuple[TrainedTask, DictConfig]]) -> dict[str, pd.DataFrame]:
    """Return one row for each recorded iterate, without its seconds and with them alone, and the last ones."""
    table = pd.DataFrame([row for task, settings in tasks for row in _task_rows(run, task, settings)])
    if table.empty:
        return {}
    steps = table.drop(columns="seconds")
    return {"table": steps, "timing": table.drop(columns=QUALITY), "summary": summary_table(steps)}


def _task_rows(run: Run, task: TrainedTask, settings: DictConfig) -> list[dict[str, Any]]:
    generator = run.generator("solvers", task.splits.name)
    test = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]  # map-style
    points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
    # Influences of test examples on the losses of training points: the same numbers.
    sources = stack(task.splits.test, test[: max(settings.num_rhs)])
    undamped = Systems(task, 0.0, sources, stack(task.train, points))

    def largest() -> dict[str, float]:
        found = top_eigenvalues(undamped.operator, 1, rtol=0.01, generator=task.generator("largest"))
        return {"largest": float(found.values[0])}

    about = f"largest eigenvalue of {task.label}"
    spectrum = run.unit("solvers/largest_eigenvalue", task.key, largest, version=1, about=about)
    damping = settings.damping if settings.damping is not None else settings.damping_ratio * spectrum["largest"]
    systems = replace(undamped, damping=damping)
    key = task.key | {"damping": damping, "num_points": settings.num_points}
    key |= {"num": settings.num_reference, "max": max(settings.num_rhs), "rtol": settings.reference_rtol}
    key |= {"dtype": settings.reference_dtype}

    def reference() -> dict[str, Any]:
        bar = run.progress(0, f"reference {task.label}")
        solver = BlockConjugateGradient(settings.reference_rtol, callback=lambda _: bar.update())
        exact = systems.in_double_precision() if settings.reference_dtype == "float64" else systems
        b = systems.right_hand_sides[:, : settings.num_reference].to(exact.operator.dtype)
        solution = solver.solve(exact.damped, b)
        run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.float(), "residual": float(solution.residual.max())}

    about = f"exact solutions {task.label}"
    exact = run.unit("solvers/reference", key, reference, version=1, about=about)["solutions"]
    rows: list[dict[str, Any]] = []
    for num_rhs in settings.num_rhs:
        for method in settings.methods:
            num = num_rhs if method not in INDEPENDENT else min(num_rhs, settings.max_independent[method])
            unit = key | {"method": method, "num_solved": num, "rtol_method": settings.rtol}
            unit |= {"rank": settings.nystrom_rank} if method == "nystrom_cg" else {}
            unit |= {"chosen_by": "curvature"} if method == "default" else {}  # once by the size alone

            trajectory = partial(_trajectory, systems, settings, exact, method=method, num=num)
            about = f"{method} on {task.label}, {num} right-hand sides"
            found = run.unit("solvers/trajectory", unit, trajectory, version=1, about=about)
            shared = {"task": task.label, "num_rhs": num_rhs, "method": LABELS[method], "num_solved": num}
            rows += _rows(shared, num, found)
    return rows


def _trajectory(
    systems: Systems, settings: DictConfig, reference: Tensor, *, method: str, num: int
) -> dict[str, Any]:
    """Return how a method ended, and work, seconds, errors and correlations of its recorded iterates."""
    run, gradients = systems.task.run, systems.test_gradients
    recorder = Recorder(Counter(), reference.to(gradients), gradients, work_clock(run.device))
    b = systems.right_hand_sides[:, :num].contiguous()
    counted = CountedSystems(systems, b, recorder, settings.rtol, settings.nystrom_rank)
    systems.operator @ b[:, :1]  # what PyTorch loads for a first product is no method's
    outcome = solve(counted, method, run.generator("solvers", systems.task.seed_name, method))
    run.add_matvecs(int(recorder.counter.work))
    columns = {name: [row[name] for row in recorder.rows] for name in ("work", "seconds")}
    stacked = {n: torch.stack([row[n] for row in recorder.rows]) for n in ("errors", "correlations")}  # type: ignore[misc]
    return outcome | columns | stacked


def _rows(shared: dict[str, Any], num: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each recorded iterate; the last is the answer, unless the method diverged."""
    columns = (found[name] for name in ("work", "seconds", "errors", "correlations"))
    return [
        shared
        | {"work": work / num, "error": float(errors.median()), "error_worst": float(errors.max())}
        | {"correlation": float(correlations.median()), "correlation_worst": float(correlations.min())}
        | {"seconds": seconds / num, "residual": found["residual"], "outcome": found["outcome"]}
        for work, seconds, errors, correlations in zip(*columns, strict=True)
    ]


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the end of each trajectory, with its work as a share of CG's for as many systems."""
    ends = table.groupby(["task", "num_rhs", "method"], sort=False).tail(1)
    of_cg = ends[(ends.method == LABELS["cg"]) & (ends.outcome == "converged")]
    of_cg = of_cg[["task", "num_rhs", "work"]].rename(columns={"work": "work_cg"})
    ends = ends.merge(of_cg, on=["task", "num_rhs"], how="left")
    return ends.assign(work_over_cg=ends.work / ends.work_cg).drop(columns="work_cg")


# ------------------------------------------------------------------------------------ figure
def draw(computed: Computed) -> dict[str, Figure]:
    """Return errors over products of each task with its most systems: medians over those that were solved."""
    table = computed["table"]
    table = table[table.num_rhs == table.groupby("task").num_rhs.transform("max")]
    table = table.assign(lost=(1 - table.correlation).clip(lower=FLOOR))
    groups = list(table.groupby(["task", "num_rhs"], sort=False))
    figure, axes = plots.figure(2, len(groups), panel_size=(7.9 / len(groups), 2.6), sharey="row", sharex="col")
    styles = panels.styles_of(table.method.unique())
    for column, ((task, num_rhs), own) in enumerate(groups):
        for method, look in styles.items():
            width = 2.4 if "default" in str(method) else 1.2
            line = look | {"label": method, "marker": "", "linewidth": width}
            for ax, y in zip(axes[:, column], ("error", "lost"), strict=True):
                _curve(ax, own[own.method == method], ("work", y), line)
        title = f"{task}\n{num_rhs} right-hand side{'s' if num_rhs != 1 else ''}"
        panels.frame(axes[0, column], title=title, log="xy", size=9)
        panels.frame(axes[1, column], x="products a system", log="xy")
    axes[0, 0].set(ylabel="relative error of x", ylim=(None, 30))
    axes[1, 0].set(ylabel="1 - correlation of scores", ylim=(FLOOR, 3))
    panels.legend(figure, axes=axes[0], title="dot: an answer; cross: diverges")
    return {"figure.png": figure}


def _curve(ax: Axes, curve: pd.DataFrame, of: tuple[str, str], look: dict[str, Any]) -> None:
    """Draw a trajectory with its end marked: a dot for an answer, a cross where it diverged."""
    if curve.empty:
        return
    x, y = (curve[name] for name in of)
    ax.plot(x, y, **look)
    diverged = str(curve.outcome.iloc[-1]).startswith("diverges")
    ax.plot(x.iloc[-1:], y.iloc[-1:], **look | {"label": None, "marker": "x" if diverged else "o"})
