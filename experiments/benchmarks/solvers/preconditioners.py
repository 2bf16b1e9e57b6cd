"""Products and seconds to a residual, with each preconditioner and by a peer."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, exact, out_of_reach, panels, plots, unit
from curvlab.lab import judge as verdict
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Nystrom, Preconditioner, Rows
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.parts import tasks_of
from experiments.shared.gauges import work_clock
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask

RESIDUALS = (1e-1, 1e-2, 1e-3)
JUDGED = 1e-2
PEER = "curvlinops CG"
TOP = 1e3  # errors above it are not drawn: where they start is marked
NONE = [math.nan] * len(RESIDUALS)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each task, preconditioner and residual, its seconds in a table of their own."""
    rows: list[dict[str, Any]] = []
    for task in tasks_of(run, cfg, "preconditioners"):
        systems = fitted_systems(task.trained())
        about = {"fitted": task.settings.fitted, "train_loss": systems.task.train_loss, "damping": systems.damping}
        labels = [*preconditioners_of(task.settings), "CG", *([PEER] if task.settings.curvlinops else [])]
        for label in labels:
            found, names = _solved(systems, label=label), {"task": task.label, "preconditioner": label}
            for target, products, seconds in zip(RESIDUALS, found["products"], found["seconds"], strict=True):
                row = names | {"target": target, "products": products, "seconds": seconds}
                rows.append(row | {"residual": found["residual"]} | about)
    table = pd.DataFrame(rows)
    if table.empty:
        return {}
    return {
        "preconditioners": table.drop(columns="seconds"),
        "preconditioner_timing": table.drop(columns=["products", "residual"]),
    }


@dataclass(frozen=True)
class FittedSystems(Systems):
    """(G + damping I) X = B, B gradients of some test losses; λmax of G is `value`, and has a `vector`."""

    spectrum: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """What the answers depend on."""
        return self.task.key | {"num_rhs": len(self.sources[1]), "damping": self.damping}


def fitted_systems(task: TrainedTask) -> FittedSystems:
    """Return the systems that the task's settings ask for."""
    settings, generator = task.settings, task.run.generator("preconditioners", task.splits.name)
    num_test = len(task.splits.test)  # type: ignore[arg-type]  # map-style
    chosen = stack(task.splits.test, torch.randperm(num_test, generator=generator)[: settings.num_rhs])
    undamped = FittedSystems(task, 0.0, chosen, chosen)
    spectrum = _largest(task, undamped)
    damping = settings.damping if settings.damping is not None else settings.damping_ratio * spectrum["value"]
    return replace(undamped, damping=float(damping), spectrum=spectrum)


@unit("preconditioners/largest", version=1, about="largest eigenvalue of {seed_name}")
def _largest(task: TrainedTask, systems: Systems, /, **_: Any) -> dict[str, Any]:
    found = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=task.generator("largest"))
    return {"value": float(found.values[0]), "vector": found.vectors[:, 0]}


def preconditioners_of(settings: DictConfig) -> dict[str, Preconditioner | None]:
    """Return every preconditioner of the settings by its label."""
    found: dict[str, Preconditioner | None] = {"none": None}
    found |= {f"Nyström {rank}": Nystrom(rank) for rank in settings.nystrom_ranks}
    for own in settings.rows:
        label = f"{own.num_rows} rows" + (f" to {own.rank}" if own.rank else "")
        label += {"outputs": "", "traces": ", by traces"}[own.score]
        found[label] = Rows(own.num_rows, rank=own.rank, score=own.score)
    return found


class _Clock:
    """When, and after how many steps, each system first had each residual."""

    def __init__(self, run: Run, num: int) -> None:
        self.now = work_clock(run.device)
        self.start = self.now()
        self.steps = torch.full((len(RESIDUALS), num), math.nan)
        self.all_steps, self.seconds = list(NONE), list(NONE)  # when all had it at once

    def __call__(self, state: Any) -> None:
        residuals = state.relative_residuals.cpu()
        for index, target in enumerate(RESIDUALS):
            self.steps[index, (residuals <= target) & self.steps[index].isnan()] = state.num_steps
            if float(residuals.max()) <= target and math.isnan(self.seconds[index]):
                self.all_steps[index], self.seconds[index] = state.num_steps, self.now() - self.start

    def found(self, steps: Tensor, set_up: int, residual: Tensor) -> dict[str, Any]:
        """Return products and seconds for each system, from its steps."""
        num = self.steps.shape[1]
        # One product more a system where a residual is recomputed before it is believed, as every solve ends.
        products, seconds = (steps + 1 + set_up / num).tolist(), [value / num for value in self.seconds]
        return {"products": products, "seconds": seconds, "residual": float(residual.max())}


@unit("preconditioners/solve", version=1, about="{label} on {seed_name}")
def _solved(systems: FittedSystems, /, *, label: str, **_: Any) -> dict[str, Any]:
    """Return products and seconds to each residual, and the residual at the end."""
    settings, b = systems.task.settings, systems.right_hand_sides.contiguous()
    if label == "CG":
        return _cg(systems, b[:, : settings.num_cg])
    if label == PEER:
        return _curvlinops(systems, b[:, : settings.num_cg], **settings.curvlinops)
    return _block_cg(systems, b, preconditioners_of(settings)[label])


def _block_cg(systems: Systems, b: Tensor, preconditioner: Preconditioner | None) -> dict[str, Any]:
    systems.operator @ b[:, :2]  # what PyTorch loads for a first product is no preconditioner's
    clock, set_up, inverse = _Clock(systems.run, b.shape[1]), 0, None
    if preconditioner is not None:
        generator = systems.task.generator("preconditioners")
        inverse, set_up = preconditioner.build(systems.damped, generator=generator)
    solver = BlockConjugateGradient(0.9 * RESIDUALS[-1], preconditioner=inverse, callback=clock)
    solution = solver.solve(systems.damped, b)
    systems.run.add_matvecs(solution.num_matvecs + set_up)
    return clock.found(torch.tensor(clock.all_steps), set_up, solution.residual)


def _cg(systems: Systems, b: Tensor) -> dict[str, Any]:
    """Conjugate gradients for each system by itself, no preconditioner: products are a mean over systems."""
    clock = _Clock(systems.run, b.shape[1])
    solution = ConjugateGradient(0.9 * RESIDUALS[-1], callback=clock).solve(systems.damped, b)
    systems.run.add_matvecs(solution.num_matvecs)
    return clock.found(clock.steps.mean(1), 0, solution.residual)


def _curvlinops(systems: Systems, b: Tensor, *, max_iter: int, tolerance: float) -> dict[str, Any]:
    """The peer's CG; it tells no residual, so that is computed afterwards."""
    if importlib.util.find_spec("curvlinops") is None:
        return {"products": NONE, "seconds": NONE, "residual": math.nan}
    inverse = curvlinops_inverse(systems, max_iter=max_iter, tolerance=tolerance)
    clock = work_clock(systems.run.device)
    start = clock()
    x = (inverse @ b).detach()
    seconds = (clock() - start) / b.shape[1]
    residual = largest_residual(systems, x, b)
    reached = [seconds if residual <= target else math.nan for target in RESIDUALS]
    return {"products": NONE, "seconds": reached, "residual": residual}


def largest_residual(systems: Systems, x: Tensor, b: Tensor) -> float:
    """Return ‖b - (G + damping I) x‖ / ‖b‖ of the worst system."""
    return float(((systems.damped @ x - b).norm(dim=0) / b.norm(dim=0)).max())


def curvlinops_inverse(systems: Systems, *, max_iter: int, tolerance: float) -> Any:
    """Return the peer's (G + damping I)⁻¹, which solves where it is multiplied."""
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    model = systems.task.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = [(inputs, targets) for inputs, targets in systems.operator.batches]
    matrix = GGNLinearOperator(model, systems.task.loss, parameters, data, check_deterministic=False)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    unit = IdentityLinearOperator(shapes, parameters[0].device, parameters[0].dtype)
    return CGInverseLinearOperator(matrix + systems.damping * unit, max_iter=max_iter, tolerance=tolerance)


# ------------------------------------------------------------------------------------ claims
CLAIMS, NOT_REACHED = ("products",), "No solver with rows, or none without, reaches the residual."


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every fitted task by itself; counts are exact."""
    table = computed["preconditioners"]
    results: list[ClaimResult] = []
    for task, own in table[table.fitted & (table.target == JUDGED)].groupby("task", sort=False):
        claim, by_rows = claims.claim("products", of=str(task)), own.preconditioner.str.contains("rows")
        rows, others = (fewest(own[which], "products") for which in (by_rows, ~by_rows))
        if rows is None or others is None:
            results.append(out_of_reach(claim, NOT_REACHED))
            continue
        few, why = float(rows.products), f"{rows.preconditioner} takes fewest; without rows "
        why += f"{others.preconditioner} does, {others.products:.3g}."
        results.append(verdict(claim, few, exact(few), if_not_reproduced=why))
    return results


def fewest(rows: pd.DataFrame, column: str) -> Any:
    """Return the row with the fewest; None where none has arrived."""
    arrived = rows.dropna(subset=column)
    return None if arrived.empty else arrived.sort_values(column).iloc[0]


# ------------------------------------------------------------------------------------ figure
def draw(computed: Computed) -> dict[str, Figure]:
    """Return one column for each task: residuals by products above, LiSSA's errors by passes below."""
    table, steps = computed["preconditioners"], computed["lissa_steps"]
    figure, axes = plots.figure(2, table.task.nunique(), panel_size=(4.6, 2.8))
    for (above, below), (task, own) in zip(axes.T, table.groupby("task", sort=False), strict=True):
        _draw_products(above, own)
        _draw_errors(below, steps[steps.task == task])
        kind = "fitted" if bool(own.fitted.iloc[0]) else "stopped early"
        title = str(task) if str(task).endswith(("early", "overfitted")) else f"{task}, {kind}"
        panels.frame(above, x="products a system, set-up included", title=title, log="xy", size=9)
        panels.frame(below, x="products with all data a system", log="xy")
    axes[0, 0].set_ylabel("residual")
    axes[1, 0].set_ylabel("LiSSA: relative error")
    for row in axes:
        handles, labels = row[0].get_legend_handles_labels()
        row[-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=7)
    return {"figure_more.png": figure}


def _draw_products(ax: Axes, own: pd.DataFrame) -> None:
    """Draw a line for each preconditioner; those with rows are solid."""
    own = own.dropna(subset="products")
    styles = panels.styles_of(own.preconditioner.unique())
    for index, (label, curve) in enumerate(own.groupby("preconditioner", sort=False)):
        look: dict[str, Any] = styles[label] | {"linestyle": "-" if "rows" in str(label) else "--"}
        look["markersize"] = max(3.5, 7.5 - 0.5 * index)  # smaller on larger: equal curves are both seen
        ax.plot(curve.products, curve.target, label=str(label), **look)


def _draw_errors(ax: Axes, own: pd.DataFrame) -> None:
    styles = panels.styles_of(own["sampling"].unique())
    for index, (label, curve) in enumerate(own.groupby("sampling", sort=False)):
        color, width = styles[label]["color"], 3.6 - 1.2 * index  # thinner on wider: equal curves are both seen
        shown = curve.error <= TOP
        ax.plot(curve.passes[shown], curve.error[shown], color=color, linewidth=max(width, 0.8), label=str(label))
        above = curve.passes[~shown]
        if len(above):
            ax.plot(above.iloc[:1], [TOP], "^", color=color, label=f"above {TOP:g} from here")
    panels.rule(ax, y=1, linestyle=":")
