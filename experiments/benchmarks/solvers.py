"""Solvers against cost: error of the solution and correlation of influences, by products and by seconds.

make bench-solvers PRESET=smoke|embedded|laptop|paper

Right-hand sides are gradients of test losses. Work is counted a vector in products with the matrix of the whole
data, everything included: set-up, recomputed residuals, a batch by its share of the data. LiSSA, Chebyshev
iteration and CG, EK-FAC's too, treat every system by itself, so they are run on `max_independent` of the systems
at most (their work a system is the same for more); block CG and Nyström share, and gain with the number.

The reference is block CG in double precision (in single where the config says so, `reference_dtype`), to
`reference_rtol`. Seconds are CPU seconds of this process and stand in timing.csv.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab import runs
from curvlab.curvature import GaussNewtonOperator
from curvlab.data import stack
from curvlab.influence import per_example_gradients
from curvlab.linalg import identity
from curvlab.reporting import save_claims
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.solvers_counting import Counter, Recorder, clock
from experiments.benchmarks.solvers_methods import INDEPENDENT, LABELS, Problem, solve
from experiments.benchmarks.solvers_plot import draw
from experiments.language_task import build_language_task
from experiments.lissa.fig2_recipe import predictions_per_example
from experiments.task import Task, build_task

SHARED = ("rtol", "reference_rtol", "reference_dtype", "num_points", "damping_ratio")


@runs.main("benchmarks/solvers")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, draw."""
    with runs.start(cfg, paper="benchmarks", item="solvers", title="Solvers against cost") as run:
        parts = _parts(cfg)
        table = pd.concat([_task_table(run, part) for part in parts], ignore_index=True)
        timing = table.drop(columns=["error", "error_worst", "correlation", "correlation_worst", "outcome"])
        saved = pd.read_csv(run.save_table(table.drop(columns="seconds")))
        timing = pd.read_csv(run.save_table(timing, "timing.csv"))
        run.save_table(summary_table(saved), "summary.csv")
        save_claims(run.folder, [])  # no paper compares these
        for name, figure in draw(saved, timing).items():
            run.save_figure(figure, name)
        run.note(
            seconds="CPU seconds of one process" if run.device.type == "cpu" else "seconds",
            threads=torch.get_num_threads(),
            scale={"seeds": 1, "right-hand sides": [list(part.num_rhs) for part in parts]},
        )


def _parts(cfg: DictConfig) -> list[DictConfig]:
    """Return the config of each task: the top level's, then those under `also`."""
    shared = OmegaConf.masked_copy(cfg, list(SHARED))
    further = [OmegaConf.merge(shared, part) for part in (cfg.also or {}).values()]
    return [cfg, *further]  # type: ignore[list-item]  # merged mappings are mappings


def _task_table(run: runs.Run, part: DictConfig) -> pd.DataFrame:
    task = build_language_task(run, part) if part.language else build_task(run, part)
    key = task.key | {"task": task.name, "version": 1}
    generator = run.generator("solvers", task.splits.name)
    test = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]
    points = torch.randperm(task.num_train, generator=generator)[: part.num_points].sort().values
    shared = _Shared(run, task, part, test[: max(part.num_rhs)], points)
    spectrum = run.unit("solvers/largest_eigenvalue", key, shared.largest)
    damping = part.damping if part.damping is not None else part.damping_ratio * spectrum["largest"]
    key |= {"damping": damping, "num_points": part.num_points}
    of_reference = {"num": part.num_reference, "max": max(part.num_rhs), "rtol": part.reference_rtol}
    of_reference |= {"dtype": part.reference_dtype} if part.reference_dtype != "float64" else {}
    reference = run.unit("solvers/reference", key | of_reference, partial(shared.reference, damping))
    rows: list[dict[str, Any]] = []
    for num_rhs in part.num_rhs:
        for method in part.methods:
            num_solved = num_rhs if method not in INDEPENDENT else min(num_rhs, part.max_independent[method])
            settings = key | of_reference | {"method": method, "num_solved": num_solved, "rtol_method": part.rtol}
            settings |= {"rank": part.nystrom_rank} if "nystrom" in method else {}
            settings |= {"version": 2} if method in ("lissa_auto", "block_cg", "nystrom_cg", "default") else {}
            compute = partial(shared.run_method, method, num_solved, damping, reference["solutions"])
            found = run.unit("solvers/trajectory", settings, compute)
            rows += _rows(task.name, num_rhs, method, num_solved, found)
    return pd.DataFrame(rows)


class _Shared:
    """What the units of one task have in common."""

    def __init__(self, run: runs.Run, task: Task, part: DictConfig, test: Tensor, points: Tensor) -> None:
        self.run, self.task, self.part = run, task, part
        self.test, self.points = stack(task.splits.test, test), stack(task.train, points)
        self.operator = GaussNewtonOperator(task.model, task.loss, task.train)

    def gradients(self, num: int) -> Tensor:
        some = (self.test[0][:num], self.test[1][:num])
        return per_example_gradients(self.task.model, self.task.loss, some).T.contiguous()

    def largest(self) -> dict[str, float]:
        generator = self.run.generator("largest", self.task.name)
        return {"largest": float(top_eigenvalues(self.operator, 1, rtol=0.01, generator=generator).values[0])}

    def reference(self, damping: float) -> dict[str, Any]:
        """Return (G + damping I)⁻¹ B for the first systems."""
        dtype = {"float32": torch.float32, "float64": torch.float64}[self.part.reference_dtype]
        model = copy.deepcopy(self.task.model).to(dtype)
        exact = GaussNewtonOperator(model, self.task.loss, self.task.train) + damping * identity
        bar = self.run.progress(0, f"reference {self.task.name}")
        solver = BlockConjugateGradient(self.part.reference_rtol, callback=lambda step, residuals: bar.update())
        solution = solver.solve(exact, self.gradients(self.part.num_reference).to(dtype))
        self.run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.float(), "residual": float(solution.residual.max())}

    def run_method(self, method: str, num: int, damping: float, reference: Tensor) -> dict[str, Any]:
        readout = per_example_gradients(self.task.model, self.task.loss, self.points)
        recorder = Recorder(Counter(), reference.to(readout), readout, clock(self.run.device))
        problem = Problem(
            operator=self.operator,
            damping=damping,
            right_hand_sides=self.gradients(num),
            recorder=recorder,
            rtol=self.part.rtol,
            nystrom_rank=self.part.nystrom_rank,
            predictions=predictions_per_example(self.task),
        )
        outcome = solve(problem, method, self.run.generator("solvers", self.task.name, method))
        self.run.add_matvecs(int(recorder.counter.work))
        columns = {name: [row[name] for row in recorder.rows] for name in ("work", "seconds")}
        stacked = {n: torch.stack([row[n] for row in recorder.rows]) for n in ("errors", "correlations")}  # type: ignore[misc]
        return outcome | columns | stacked


def _rows(task: str, num_rhs: int, method: str, num_solved: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a recorded iterate; the last is the answer, unless the method diverged."""
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


if __name__ == "__main__":
    main()
