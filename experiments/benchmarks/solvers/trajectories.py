"""The solvers that are compared: set-up, and trajectory beside a reference, by products and by seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab import solvers
from curvlab.lab import Computed, Run, panels, plots, unit
from curvlab.linalg import identity
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.benchmarks.parts import tasks_of
from experiments.benchmarks.solvers.chebyshev import Chebyshev
from experiments.shared.gauges import work_clock
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask
from experiments.shared.trajectory import CountedOperator, Counter, Stride, Trajectory

GROWTH = 1.25  # between steps at which the iterate is looked at
LABELS = {"lissa_recipe": "LiSSA, C = 2", "lissa_auto": "Lissa.auto", "chebyshev": "Chebyshev", "cg": "CG"}
LABELS |= {"ekfac_cg": "CG, EK-FAC", "nystrom_cg": "CG, Nyström", "block_cg": "block CG"}
LABELS |= {"nystrom_block_cg": "block CG, Nyström", "default": "default"}
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
@unit("solvers/trajectory", version=1, about="{method} on {seed_name}, {num_solved} right-hand sides")
def _trajectory(
    task: TrainedTask, systems: Systems, reference: Tensor, /, *, method: str, num_solved: int, **_: Any
) -> dict[str, Any]:
    """Return how a method ended, and work, seconds, errors and correlations of its recorded iterates."""
    gradients, b = systems.test_gradients, systems.right_hand_sides[:, :num_solved].contiguous()
    trajectory = Trajectory(reference[:, :num_solved].to(gradients), gradients)
    recorder = Recorder(Counter(), trajectory, work_clock(task.run.device))
    systems.operator @ b[:, :1]  # what PyTorch loads for a first product is no method's
    outcome = _solve(systems, b, method, recorder)
    task.run.add_matvecs(int(recorder.counter.work))
    return outcome | trajectory.as_tensors() | {"seconds": recorder.seconds}


def _solve(systems: Systems, b: Tensor, method: str, recorder: Recorder) -> dict[str, object]:
    """Run a method from its set-up to its residual; return its outcome in words and its largest residual."""
    generator = systems.task.generator("solvers", method)
    operator = CountedMatrix(systems.operator, recorder.counter)
    recorder.start()
    if "lissa" in method:
        solver = _lissa(systems, operator, method, generator)
    else:
        solver = _solver(systems, b, method, recorder.counter, generator)
    solver = replace(solver, callback=recorder)
    try:
        solution = solver.solve(operator + systems.damping * identity, b, generator=generator)
    except solvers.DivergenceError as error:
        return {"outcome": f"diverges at step {error.step}", "residual": math.inf}
    recorder.record(solution.x)
    outcome = "converged" if solution.converged else "not converged"
    if isinstance(solver, solvers.Lissa):  # its tolerance for the residual says little about scores
        outcome = f"all {solver.num_steps} steps"
    return {"outcome": outcome, "residual": float(solution.residual.max())}


def _solver(systems: Systems, b: Tensor, method: str, counter: Counter, generator: torch.Generator) -> Any:
    rtol, rank = systems.task.settings.rtol, systems.task.settings.nystrom_rank
    known: dict[str, Any] = {
        "cg": solvers.ConjugateGradient(rtol),
        "block_cg": BlockConjugateGradient(rtol),
        "chebyshev": Chebyshev(rtol),
        "nystrom_cg": solvers.ConjugateGradient(rtol, preconditioner=solvers.Nystrom(rank)),
        "ekfac_cg": solvers.ConjugateGradient(rtol, preconditioner=solvers.Ekfac()),
        "nystrom_block_cg": solvers.default_solver(*b.shape, rtol=rtol),
    }
    if method == "default":
        # What `influence` takes by default: it looks at the examples' curvature, which costs four forwards.
        known[method] = solvers.default_solver(*b.shape, rtol=rtol, operator=systems.damped)
        counter.work += 0.8
    solver = known[method]
    preconditioner = getattr(solver, "preconditioner", None)
    if not isinstance(preconditioner, solvers.Rows | solvers.Ekfac):
        return solver
    # These read the model's layers, so what they cost is added by hand.
    inverse, cost = preconditioner.build(systems.damped, generator=generator)
    counter.work += cost
    return replace(solver, preconditioner=inverse)


def _lissa(systems: Systems, operator: CountedMatrix, method: str, generator: torch.Generator) -> solvers.Lissa:
    if method == "lissa_auto":
        recipe = solvers.measure_recipe(operator, systems.damping, sampling="uniform", generator=generator)
        return solvers.Lissa.from_recipe(recipe)
    trace = hutchinson_trace(operator, rtol=0.05, generator=generator).value
    largest = float(top_eigenvalues(operator, 1, rtol=0.01, generator=generator).values[0])
    settings = solvers.lissa_hyperparameters(
        trace=max(trace, largest), largest_eigenvalue=largest, damping=systems.damping
    )
    batch_size = math.ceil(settings.batch_size / systems.task.predictions_per_example)
    return solvers.Lissa(settings.step_size, batch_size, settings.num_steps)


# ------------------------------------------------------------------------------------ tables
QUALITY = ["error", "error_worst", "correlation", "correlation_worst", "outcome"]
FLOOR = 1e-7  # of 1 - correlation: below it is rounding of the reference


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each recorded iterate, without its seconds and with them alone, and the last ones."""
    run.note(seconds="CPU seconds of one process" if run.device.type == "cpu" else "seconds")
    table = pd.DataFrame([row for task in tasks_of(run, cfg, "solvers") for row in _task_rows(task.trained())])
    if table.empty:
        return {}
    steps = table.drop(columns="seconds")
    return {"table": steps, "timing": table.drop(columns=QUALITY), "summary": summary_table(steps)}


def _task_rows(task: TrainedTask) -> list[dict[str, Any]]:
    settings, generator = task.settings, task.run.generator("solvers", task.splits.name)
    test = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]  # map-style
    points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
    # Influences of test examples on the losses of training points: the same numbers.
    sources = stack(task.splits.test, test[: max(settings.num_rhs)])
    systems = Systems(task, 0.0, sources, stack(task.train, points))
    largest = _largest(task, systems)["largest"]
    damping = settings.damping if settings.damping is not None else settings.damping_ratio * largest
    systems = replace(systems, damping=damping)
    key = {"damping": damping, "num_points": settings.num_points, "num": settings.num_reference}
    key |= {"max": max(settings.num_rhs), "rtol": settings.reference_rtol, "dtype": settings.reference_dtype}
    exact = _reference(task, systems, **key)["solutions"]
    rows: list[dict[str, Any]] = []
    for num_rhs in settings.num_rhs:
        for method in settings.methods:
            num = num_rhs if method not in INDEPENDENT else min(num_rhs, settings.max_independent[method])
            own = key | {"method": method, "num_solved": num, "rtol_method": settings.rtol}
            own |= {"rank": settings.nystrom_rank} if method == "nystrom_cg" else {}
            own |= {"chosen_by": "curvature"} if method == "default" else {}  # once by the size alone
            shared = {"task": task.label, "num_rhs": num_rhs, "method": LABELS[method], "num_solved": num}
            rows += _rows(shared, num, _trajectory(task, systems, exact, **own))
    return rows


@unit("solvers/largest_eigenvalue", version=1, about="largest eigenvalue of {seed_name}")
def _largest(task: TrainedTask, systems: Systems, /, **_: Any) -> dict[str, float]:
    found = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=task.generator("largest"))
    return {"largest": float(found.values[0])}


@unit("solvers/reference", version=1, about="exact solutions {seed_name}")
def _reference(
    task: TrainedTask, systems: Systems, /, *, num: int, rtol: float, dtype: str, **_: Any
) -> dict[str, Any]:
    bar = task.run.progress(0, f"reference {task.label}")
    solver = BlockConjugateGradient(rtol, callback=lambda _: bar.update())
    exact = systems.in_double_precision() if dtype == "float64" else systems
    solution = solver.solve(exact.damped, systems.right_hand_sides[:, :num].to(exact.operator.dtype))
    task.run.add_matvecs(solution.num_matvecs)
    return {"solutions": solution.x.float(), "residual": float(solution.residual.max())}


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
                _curve(ax, own[own.method == method], y, line)
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


def _curve(ax: Axes, curve: pd.DataFrame, y: str, look: dict[str, Any]) -> None:
    """Draw a trajectory with its end marked: a dot for an answer, a cross where it diverged."""
    if curve.empty:
        return
    ax.plot(curve.work, curve[y], **look)
    diverged = str(curve.outcome.iloc[-1]).startswith("diverges")
    ax.plot(curve.work.iloc[-1:], curve[y].iloc[-1:], **look | {"label": None, "marker": "x" if diverged else "o"})
