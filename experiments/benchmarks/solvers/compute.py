"""Every method's trajectory to its residual, beside a reference."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import per_example_gradients
from curvlab.lab import runs, task_settings
from curvlab.linalg import identity
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.gauges import work_clock
from experiments.benchmarks.solvers.counting import Counter, Recorder
from experiments.benchmarks.solvers.methods import INDEPENDENT, LABELS, CountedSystems, solve
from experiments.shared.task import Task, TrainedTask

QUALITY = ["error", "error_worst", "correlation", "correlation_worst", "outcome"]


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each recorded iterate, without its seconds and with them alone, and the last ones."""
    tasks = task_settings(cfg).items()
    table = pd.concat([_task_table(run, name, settings) for name, settings in tasks], ignore_index=True)
    run.note(
        seconds="CPU seconds of one process" if run.device.type == "cpu" else "seconds",
        threads=torch.get_num_threads(),
    )
    steps = table.drop(columns="seconds")
    return {"table": steps, "timing": table.drop(columns=QUALITY), "summary": summary_table(steps)}


def _task_table(run: runs.Run, name: str, settings: DictConfig) -> pd.DataFrame:
    task = Task.load(run, name, settings).trained()
    generator = run.generator("solvers", task.splits.name)
    test = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]
    points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
    measured = _Measured(run, task, settings, test[: max(settings.num_rhs)], points)
    about = f"largest eigenvalue of {task.label}"
    spectrum = run.unit("solvers/largest_eigenvalue", task.key, measured.largest, version=1, about=about)
    damping = settings.damping if settings.damping is not None else settings.damping_ratio * spectrum["largest"]
    key = task.key | {"damping": damping, "num_points": settings.num_points}
    key |= {"num": settings.num_reference, "max": max(settings.num_rhs), "rtol": settings.reference_rtol}
    key |= {"dtype": settings.reference_dtype}
    about = f"exact solutions {task.label}"
    reference = run.unit("solvers/reference", key, partial(measured.reference, damping), version=1, about=about)
    rows: list[dict[str, Any]] = []
    for num_rhs in settings.num_rhs:
        for method in settings.methods:
            num_solved = num_rhs if method not in INDEPENDENT else min(num_rhs, settings.max_independent[method])
            unit = key | {"method": method, "num_solved": num_solved, "rtol_method": settings.rtol}
            unit |= {"rank": settings.nystrom_rank} if method == "nystrom_cg" else {}
            unit |= {"chosen_by": "curvature"} if method == "default" else {}  # once by the size alone
            trajectory = partial(measured.trajectory, method, num_solved, damping, reference["solutions"])
            about = f"{method} on {task.label}, {num_solved} right-hand sides"
            found = run.unit("solvers/trajectory", unit, trajectory, version=1, about=about)
            rows += _rows(task.label, num_rhs, method, num_solved, found)
    return pd.DataFrame(rows)


class _Measured:
    """The units of one task and what they have in common."""

    def __init__(
        self, run: runs.Run, task: TrainedTask, settings: DictConfig, test: Tensor, points: Tensor
    ) -> None:
        self.run, self.task, self.settings = run, task, settings
        self.test, self.points = stack(task.splits.test, test), stack(task.train, points)
        self.operator = GaussNewtonOperator(task.model, task.loss, task.train)

    def gradients(self, num: int) -> Tensor:
        some = (self.test[0][:num], self.test[1][:num])
        return per_example_gradients(self.task.model, self.task.loss, some).T.contiguous()

    def largest(self) -> dict[str, float]:
        generator = self.run.generator("largest", self.task.seed_name)
        return {"largest": float(top_eigenvalues(self.operator, 1, rtol=0.01, generator=generator).values[0])}

    def reference(self, damping: float) -> dict[str, Any]:
        """Return (G + damping I)⁻¹ B for the first systems."""
        dtype = {"float32": torch.float32, "float64": torch.float64}[self.settings.reference_dtype]
        model = copy.deepcopy(self.task.model).to(dtype)
        exact = GaussNewtonOperator(model, self.task.loss, self.task.train) + damping * identity
        bar = self.run.progress(0, f"reference {self.task.label}")
        rtol = self.settings.reference_rtol
        solver = BlockConjugateGradient(rtol, callback=lambda _: bar.update())
        solution = solver.solve(exact, self.gradients(self.settings.num_reference).to(dtype))
        self.run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.float(), "residual": float(solution.residual.max())}

    def trajectory(self, method: str, num: int, damping: float, reference: Tensor) -> dict[str, Any]:
        """Return how a method ended, and work, seconds, errors and correlations of its recorded iterates."""
        gradients = per_example_gradients(self.task.model, self.task.loss, self.points)
        recorder = Recorder(Counter(), reference.to(gradients), gradients, work_clock(self.run.device))
        systems = CountedSystems(
            operator=self.operator,
            damping=damping,
            right_hand_sides=self.gradients(num),
            recorder=recorder,
            rtol=self.settings.rtol,
            nystrom_rank=self.settings.nystrom_rank,
            predictions=self.task.predictions_per_example,
        )
        self.operator @ systems.right_hand_sides[:, :1]  # what PyTorch loads for a first product is no method's
        generator = self.run.generator("solvers", self.task.seed_name, method)
        outcome = solve(systems, method, generator)
        self.run.add_matvecs(int(recorder.counter.work))
        columns = {name: [row[name] for row in recorder.rows] for name in ("work", "seconds")}
        stacked = {n: torch.stack([row[n] for row in recorder.rows]) for n in ("errors", "correlations")}  # type: ignore[misc]
        return outcome | columns | stacked


def _rows(task: str, num_rhs: int, method: str, num_solved: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each recorded iterate; the last is the answer, unless the method diverged."""
    return [
        {
            "task": task,
            "num_rhs": num_rhs,
            "method": LABELS[method],
            "num_solved": num_solved,
            "work": work / num_solved,
            "error": float(errors.median()),
            "error_worst": float(errors.max()),
            "correlation": float(correlations.median()),
            "correlation_worst": float(correlations.min()),
            "seconds": seconds / num_solved,
            "residual": found["residual"],
            "outcome": found["outcome"],
        }
        for work, seconds, errors, correlations in zip(
            found["work"], found["seconds"], found["errors"], found["correlations"], strict=True
        )
    ]


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the end of each trajectory, with its work as a share of CG's for as many systems."""
    ends = table.groupby(["task", "num_rhs", "method"], sort=False).tail(1).copy()
    of_cg = ends[(ends.method == LABELS["cg"]) & (ends.outcome == "converged")]
    of_cg = of_cg[["task", "num_rhs", "work"]].rename(columns={"work": "work_cg"})
    ends = ends.merge(of_cg, on=["task", "num_rhs"], how="left")
    ends["work_over_cg"] = ends.work / ends.work_cg
    return ends.drop(columns="work_cg")
