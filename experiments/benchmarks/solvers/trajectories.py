"""The solvers that are compared: set-up, and trajectory beside a reference, by products and by seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab import solvers
from curvlab.lab import Computed, Run, panels, plots
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.benchmarks.solvers.chebyshev import Chebyshev
from experiments.shared.gauges import work_clock
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask
from experiments.shared.trajectory import CountedOperator, Counter, Stride, Trajectory

GROWTH = 1.25  # between steps at which the iterate is looked at
LABELS = {
    "lissa_recipe": "LiSSA, C = 2",
    "lissa_auto": "Lissa.auto",
    "chebyshev": "Chebyshev",
    "cg": "CG",
    "ekfac_cg": "CG, EK-FAC",
    "nystrom_cg": "CG, Nyström",
    "block_cg": "block CG",
    "nystrom_block_cg": "block CG, Nyström",
    "default": "default",
}
# Systems are solved independently of one another, but for a set-up of a few products: the work for each does not
# depend on how many there are.
INDEPENDENT = ("lissa_recipe", "lissa_auto", "chebyshev", "cg", "ekfac_cg")


# ------------------------------------------------------------------------------------ watching
class CountedMatrix(CountedOperator):
    """A Gauss-Newton matrix, products of whose batches are counted by their share of the data."""

    # Batches are uniform here.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> CountedMatrix:
        """Return a batch, whose products count batch_size / N."""
        whole: Any = self.origin
        weight = batch_size / whole.num_examples
        return CountedMatrix(whole.sample(batch_size, generator), self.counter, weight=weight)


@dataclass
class Recorder:
    """Watches a solver: its iterates at growing steps, work and seconds, without those of the comparison.

    Attributes:
        counter: of the products.
        trajectory: beside the solutions of the systems that have one, the first.
        clock: of the seconds.
        seconds: of each recorded iterate.
    """

    counter: Counter
    trajectory: Trajectory
    clock: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    _stride: Stride = field(default_factory=lambda: Stride(GROWTH))
    _paused: float = 0.0
    _start: float = field(default=math.nan)

    def start(self) -> None:
        """Begin to count seconds."""
        self._start = self.clock()

    def __call__(self, state: Any) -> None:
        """Look at the iterate if it is time."""
        if self._stride.wants(state.num_steps):
            self.record(state.x)

    def record(self, x: Tensor) -> None:
        """Compare an iterate of all systems."""
        now = self.clock()
        self.seconds.append(now - self._start - self._paused)
        self.trajectory.add(self.counter.work, x[:, : self.trajectory.reference.shape[1]])
        self._paused += self.clock() - now


# ------------------------------------------------------------------------------------ solving
@dataclass(frozen=True)
class CountedSystems:
    """(G + damping I) X = B, and who watches one method solve it.

    Attributes:
        systems: operator and damping.
        right_hand_sides: B, (P, K).
        recorder: of one method's run.
        rtol: residual that ends it.
        nystrom_rank: of the preconditioner.
    """

    systems: Systems
    right_hand_sides: Tensor
    recorder: Recorder
    rtol: float
    nystrom_rank: int

    @property
    def operator(self) -> CountedMatrix:
        """G, whose products are counted."""
        return CountedMatrix(self.systems.operator, self.recorder.counter)

    def inverse(self, preconditioner: solvers.Rows | solvers.Ekfac, generator: torch.Generator) -> LinearOperator:
        """Return the built preconditioner; it reads the model's layers, so what it costs is added by hand."""
        inverse, cost = preconditioner.build(self.systems.damped, generator=generator)
        self.recorder.counter.work += cost
        return inverse


def solve(counted: CountedSystems, method: str, generator: torch.Generator) -> dict[str, object]:
    """Run a method from its set-up to its residual; return its outcome in words and its largest residual."""
    recorder = counted.recorder
    recorder.start()
    solver = _lissa(counted, method, generator) if "lissa" in method else _solver(counted, method, generator)
    try:
        damped = counted.operator + counted.systems.damping * identity
        solution = solver.solve(damped, counted.right_hand_sides, generator=generator)
    except solvers.DivergenceError as error:
        return {"outcome": f"diverges at step {error.step}", "residual": math.inf}
    recorder.record(solution.x)
    outcome = "converged" if solution.converged else "not converged"
    if isinstance(solver, solvers.Lissa):  # its tolerance for the residual says little about scores
        outcome = f"all {solver.num_steps} steps"
    return {"outcome": outcome, "residual": float(solution.residual.max())}


def _solver(counted: CountedSystems, method: str, generator: torch.Generator) -> solvers.Solver:
    recorder, rtol, rank = counted.recorder, counted.rtol, counted.nystrom_rank
    size, num = counted.right_hand_sides.shape
    if method == "cg":
        return solvers.ConjugateGradient(rtol, callback=recorder)
    if method == "block_cg":
        return solvers.BlockConjugateGradient(rtol, callback=recorder)
    if method == "chebyshev":
        return Chebyshev(rtol, callback=recorder)
    if method == "nystrom_cg":
        return solvers.ConjugateGradient(rtol, preconditioner=solvers.Nystrom(rank), callback=recorder)
    if method == "ekfac_cg":
        return solvers.ConjugateGradient(
            rtol, preconditioner=counted.inverse(solvers.Ekfac(), generator), callback=recorder
        )
    if method == "nystrom_block_cg":
        return dataclasses.replace(solvers.default_solver(size, num, rtol=rtol), callback=recorder)
    # What `influence` takes by default: it looks at the examples' curvature, which costs four forwards.
    chosen = solvers.default_solver(size, num, rtol=rtol, operator=counted.systems.damped)
    recorder.counter.work += 0.8
    if isinstance(chosen.preconditioner, solvers.Rows):
        inverse = counted.inverse(chosen.preconditioner, generator)
        chosen = dataclasses.replace(chosen, preconditioner=inverse)
    return dataclasses.replace(chosen, callback=recorder)


def _lissa(counted: CountedSystems, method: str, generator: torch.Generator) -> solvers.Lissa:
    operator, damping = counted.operator, counted.systems.damping
    if method == "lissa_auto":
        recipe = solvers.measure_recipe(operator, damping, sampling="uniform", generator=generator)
        solver = solvers.Lissa.from_recipe(recipe)
        return dataclasses.replace(solver, callback=counted.recorder)
    trace = hutchinson_trace(operator, rtol=0.05, generator=generator).value
    largest = float(top_eigenvalues(operator, 1, rtol=0.01, generator=generator).values[0])
    settings = solvers.lissa_hyperparameters(
        trace=max(trace, largest), largest_eigenvalue=largest, damping=damping
    )
    batch_size = math.ceil(settings.batch_size / counted.systems.task.predictions_per_example)
    return solvers.Lissa(settings.step_size, batch_size, settings.num_steps, callback=counted.recorder)


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
    trajectory = Trajectory(reference[:, :num].to(gradients), gradients)
    recorder = Recorder(Counter(), trajectory, work_clock(run.device))
    b = systems.right_hand_sides[:, :num].contiguous()
    counted = CountedSystems(systems, b, recorder, settings.rtol, settings.nystrom_rank)
    systems.operator @ b[:, :1]  # what PyTorch loads for a first product is no method's
    outcome = solve(counted, method, run.generator("solvers", systems.task.seed_name, method))
    run.add_matvecs(int(recorder.counter.work))
    return outcome | trajectory.as_tensors() | {"seconds": recorder.seconds}


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
    heights = (2.3, 2.3, 1.0) if "recipes" in computed else (2.3, 2.3)
    size = 7.9 / len(groups), 2.1 if len(heights) > 2 else 2.6
    figure, axes = plots.figure(len(heights), len(groups), panel_size=size, sharey="row", height_ratios=heights)
    for ax in axes[2:, 1:].flat:
        ax.remove()
    for (ax,) in axes[2:, :1]:
        ax.set_subplotspec(ax.get_gridspec()[2, :])  # as wide as all panels above
        _cases(ax, computed["recipes"])
    styles = panels.styles_of(table.method.unique())
    for column, ((task, num_rhs), own) in enumerate(groups):
        for method, look in styles.items():
            width = 2.4 if "default" in str(method) else 1.2
            line = look | {"label": method, "marker": "", "linewidth": width}
            for ax, y in zip(axes[:2, column], ("error", "lost"), strict=True):
                _curve(ax, own[own.method == method], ("work", y), line)
        axes[1, column].sharex(axes[0, column])
        axes[0, column].tick_params(labelbottom=False)
        title = f"{task}\n{num_rhs} right-hand side{'s' if num_rhs != 1 else ''}"
        panels.frame(axes[0, column], title=title, log="xy", size=9)
        panels.frame(axes[1, column], x="products a system", log="xy")
    axes[0, 0].set(ylabel="relative error of x", ylim=(None, 30))
    axes[1, 0].set(ylabel="1 - correlation of scores", ylim=(FLOOR, 3))
    note = "median over systems; dot: an answer, at the bottom a mark a case; cross: diverges"
    panels.legend(figure, axes=axes[0], title=note)
    return {"figure.png": figure}


def _cases(ax: Axes, recipes: pd.DataFrame) -> None:
    """Draw LiSSA's error in each case, a network and a damping, by the constant of its batch size."""
    for place, (_, own) in enumerate(recipes.groupby("recipe", sort=False)):
        diverged = own.outcome.str.startswith("diverges")
        for part, marker in ((own[~diverged], "o"), (own[diverged], "x")):
            look: dict[str, Any] = {"color": panels.COLORS["lissa"], "marker": marker, "linestyle": "none"}
            ax.plot(part.error_worst, np.full(len(part), place), markersize=5, **look)
    panels.rule(ax, x=1)
    names = recipes.recipe.unique().tolist()
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    cases = f"{len(recipes) // len(names)} cases (network, damping)"
    panels.frame(ax, x=f"LiSSA's relative error, worst system, in {cases}; dashed: zero's", log="x")


def _curve(ax: Axes, curve: pd.DataFrame, of: tuple[str, str], look: dict[str, Any]) -> None:
    """Draw a trajectory with its end marked: a dot for an answer, a cross where it diverged."""
    if curve.empty:
        return
    x, y = (curve[name] for name in of)
    ax.plot(x, y, **look)
    diverged = str(curve.outcome.iloc[-1]).startswith("diverges")
    ax.plot(x.iloc[-1:], y.iloc[-1:], **look | {"label": None, "marker": "x" if diverged else "o"})
