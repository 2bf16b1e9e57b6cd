"""Convergence of LiSSA with different batch sizes (Klochkov & Liu 2024, Fig. 2, Sec. 4).

make lissa-fig2 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits_early num_steps=2000"

LiSSA runs 1,000 steps with twice the recommended batch size, the recommended one (C = 2), and a tenth of it,
averaged over ten runs, which see as much data where ten divides the batch size (embedded: 10 x 1 examples against
13, which the claims say). Test influences are correlated between steps, as in the paper, and at each step with
those of the exact solution. The paper shows one training image (it does not say which) and one run; here every
number is a mean over several points and seeds. A run that overflows is shown as such, and no number stands for its
correlation: it has no plateau and no last step, and claims on these are out of reach. How close it came before is
judged. Where the recommended batch overflows it has not converged, and counts as 0.

One panel goes beyond the paper: an overfitted network with small damping, where the recipe with C = 2 diverges and
the one with C measured (`Lissa.auto`) does not; nor does C = 2 with examples drawn by importance, ours. Exact
solutions are in double precision. The iteration is the rescaled form after Eq. 8 of the paper, whose limit does
not depend on the step size. The damping is 5/270 of lambda_max where it is not given, as of the paper's ResNet-18.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature.layers import LayerRows
from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach, t_interval
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.names import reader_names
from curvlab.linalg import identity
from curvlab.solvers import Lissa, lissa_hyperparameters
from curvlab.solvers.lissa import LissaState
from experiments.lissa.trials import RunsOperator, blocks, rows_of
from experiments.shared import stats
from experiments.shared.gauges import return_freed_memory
from experiments.shared.recipes import compare_recipes, exact_solutions
from experiments.shared.spectrum import spectrum
from experiments.shared.systems import Systems
from experiments.shared.task import Task, TrainedTask

TARGET = Target(
    __name__,
    title="Convergence of LiSSA with different batch sizes",
    paper={
        "tasks": ["ResNet-18 on ImageNet"],
        "num_points": "one, not said which",
        "num_test": 500,
        "num_seeds": 1,
        "summary.csv:batch sizes": "200 100 10x10",
        "num_steps": 1000,
        "summary.csv:damping": 5.0,
    },
    curves=("table: pearson over step by batch_size, num_runs",),
    digits={"table": 5},
)
FIRST_STEPS = (1, 2, 5, 10, 20)
NUMBERS_AT_ONCE = 2**23  # of the iterates of runs that share their steps
# A task is in the panels of the paper or in the one on recipes, so that tables may be empty.
COLUMNS = {
    "table": "task batch_size num_runs seed point step pearson pearson_one_run pearson_last overflow",
    "between_steps": "task batch_size num_runs step other_step pearson overflow",
    "recipes": "task recipe seed batch_size num_steps point step error pearson promised diverged_at passes",
}
Rows = list[dict[str, Any]]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `between_steps`, `recipes` and `summary`, one row for each task.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `num_points` and `num_test`, how many; `damping`, or null and
            `damping_ratio` (of lambda_max); `step_size`, or null and 1 / (lambda_max + damping); `reference_rtol`;
            `spectrum`; `compare_recipes`: the panel on recipes (`recipe_seeds`) and not the paper's, which has
            `batch_size` (null: recommended), `batch_factors`, `num_steps` and `num_seeds`.
    """
    rows: dict[str, Rows] = {name: [] for name in (*COLUMNS, "summary")}
    for task in Task.each(run, cfg):
        for name, own in _of_task(task.trained(), task.settings).items():
            rows[name] += own
    return {
        name: pd.DataFrame(own, columns=COLUMNS[name].split() if name in COLUMNS else None)
        for name, own in rows.items()
    }


def _of_task(task: TrainedTask, cfg: DictConfig) -> dict[str, Rows]:
    generator = task.run.generator("fig2", task.splits.name)
    num_test = len(task.splits.test)  # type: ignore[arg-type]  # map-style
    test = torch.randperm(num_test, generator=generator)[: cfg.num_test].sort().values
    points = torch.randperm(task.num_train, generator=generator)[: cfg.num_points].sort().values
    start = Systems.at(task, 0.0, points, test)
    trace = largest = math.nan
    if None in (cfg.damping, cfg.step_size, cfg.batch_size):  # or else nothing asks for them
        measured = spectrum(task, cfg)
        trace, largest = measured["trace"], measured["largest_eigenvalue"]
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * largest
    systems = dataclasses.replace(start, damping=damping)
    exact = systems.test_gradients.cpu() @ exact_solutions(systems, rtol=cfg.reference_rtol)["solutions"]
    step_size = cfg.step_size or 1 / (largest + damping)
    found: dict[str, Rows] = {name: [] for name in COLUMNS}
    labels, recipes = [], {}
    if cfg.compare_recipes:
        recipes = compare_recipes(systems, reference_rtol=cfg.reference_rtol, num_seeds=cfg.recipe_seeds)
        found["recipes"] = _recipe_rows(task.label, recipes)
    else:
        named = {"trace": trace, "largest_eigenvalue": largest, "damping": damping}
        recommended = cfg.batch_size or lissa_hyperparameters(**named).batch_size
        settings = {"step_size": step_size, "num_steps": cfg.num_steps}
        rows = rows_of(systems.operator)
        for factor in cfg.batch_factors:
            batch_size, num_runs = max(1, round(factor * recommended)), max(1, round(1 / factor))
            together = max(1, NUMBERS_AT_ONCE // systems.right_hand_sides.numel()) if rows is not None else 1
            counts, key = [*blocks(cfg.num_seeds * num_runs, together)], {"batch_size": batch_size, **settings}
            firsts = itertools.accumulate(counts, initial=0)
            parts = [
                _scores(systems, rows, **key, first_run=first, num_runs=count)["scores"]
                for first, count in zip(firsts, counts, strict=False)
            ]
            scores = torch.cat(parts).double()
            scores = scores.unflatten(0, (cfg.num_seeds, num_runs))
            names = {"task": task.label, "batch_size": batch_size, "num_runs": num_runs}
            steps = recorded_steps(cfg.num_steps)
            found["table"] += _against_exact(names, steps, scores, exact)
            found["between_steps"] += _between_steps(names, steps, scores.mean(1))
            labels.append(f"{batch_size}" + (f"x{num_runs}" if num_runs > 1 else ""))
    summary = {
        "task": task.label,
        "P": task.num_parameters,
        "N": task.num_train,
        "train loss": task.train_loss,
        "tr(G)": trace,
        "lambda_max": largest,
        "damping": damping,
        "step size": step_size,
        "batch sizes": " ".join(labels),
        "points": exact.shape[1],
        "seeds": cfg.num_seeds if labels else cfg.recipe_seeds,
        "test points": exact.shape[0],
        "C measured": recipes.get("constant"),
        "batch size, C = 2": recipes.get("paper", {}).get("batch_size"),
        "batch size, auto": recipes.get("auto", {}).get("batch_size"),
        "C, by importance": recipes.get("importance_constant"),
        "batch size, by importance": recipes.get("importance", {}).get("batch_size"),
        "message, C = 2": recipes.get("paper", {}).get("message"),
    }
    return found | {"summary": [summary]}


def recorded_steps(num_steps: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, and from there 25 equal steps."""
    stride = max(1, num_steps // 25)
    return [step for step in FIRST_STEPS if step < stride] + list(range(stride, num_steps + 1, stride))


@unit("lissa/fig2_scores", version=2, about="LiSSA, |B| = {batch_size}, {num_runs} runs from {first_run}")
def _scores(
    systems: Systems,
    rows: list[LayerRows] | None,
    /,
    *,
    batch_size: int,
    step_size: float,
    num_steps: int,
    first_run: int,
    num_runs: int,
    **_: Any,
) -> dict[str, Any]:
    """Return scores up to sign at the recorded steps, (runs, S, M, K); they may overflow, as Eq. 6 may.

    Args:
        systems: whose solutions are approached.
        rows: `rows_of` its matrix; None for one run at a time.
        batch_size: of LiSSA, as are the next two.
        step_size: η.
        num_steps: T.
        first_run: number of the first run; each group of runs has batches of its own.
        num_runs: that share their steps.
    """
    run, wanted, scores = systems.run, set(recorded_steps(num_steps)), list[Tensor]()
    bar = run.progress(num_steps, f"LiSSA {systems.task.label}, |B| = {batch_size}, runs from {first_run}")

    def watch(state: LissaState) -> None:
        bar.update()
        if state.num_steps in wanted:
            found = (systems.test_gradients @ state.x).float()
            scores.append(found.unflatten(1, (num_runs, -1)).movedim(1, 0))
            return_freed_memory()  # 18 GB after 1,000 steps of 25 runs of the 50,890 weights at laptop

    solver = Lissa(
        step_size, batch_size, num_steps, check_residual=False, raise_on_divergence=False, callback=watch
    )
    damped = systems.damped
    if rows is not None:
        damped = RunsOperator(systems.operator, rows, num_runs) + systems.damping * identity  # type: ignore[arg-type]
    sides = systems.right_hand_sides.repeat(1, num_runs)
    generator = run.generator("fig2 lissa", systems.task.seed_name, batch_size, first_run)
    run.add_matvecs(solver.solve(damped, sides, generator=generator).num_matvecs)
    return {"scores": torch.stack(scores, 1)}


# ------------------------------------------------------------------------------------ tables
def _against_exact(names: dict[str, Any], steps: list[int], scores: Tensor, exact: Tensor) -> Rows:
    """Return a row for each seed, step and point; scores (seeds, runs, S, M, K), exact (M, K).

    pearson, correlation with the exact scores of the averaged runs; pearson_one_run, of the seed's first;
    pearson_last, of the averaged runs with their own last step. nan where a score is not finite, which `overflow`
    says of the averaged runs.
    """
    rows: Rows = []
    for seed, (mean, single) in enumerate(zip(scores.mean(1), scores[:, 0], strict=True)):
        for index, step in enumerate(steps):
            columns = {
                "pearson": stats.column_correlations(mean[index], exact),
                "pearson_one_run": stats.column_correlations(single[index], exact),
                "pearson_last": stats.column_correlations(mean[index], mean[-1]),
                "overflow": ~mean[index].isfinite().all(0),
            }
            rows += [
                names
                | {"seed": seed, "point": point, "step": step}
                | {name: values[point].item() for name, values in columns.items()}
                for point in range(exact.shape[1])
            ]
    return rows


def _between_steps(names: dict[str, Any], steps: list[int], scores: Tensor) -> Rows:
    """Return a row for each pair of steps: the correlation of the scores, (seeds, S, M, K).

    Mean over the points and seeds whose scores are finite at both steps; `overflow`, the share of the others.
    """
    rows: Rows = []
    for i, step in enumerate(steps):
        for j in range(i + 1):
            found = torch.cat([stats.column_correlations(own[i], own[j]) for own in scores])
            pair = {"step": step, "other_step": steps[j], "pearson": float(found.nanmean())}
            rows.append(names | pair | {"overflow": float(found.isnan().double().mean())})
    return rows


def _recipe_rows(task: str, recipes: dict[str, Any]) -> Rows:
    """Return a row for each recipe, seed, step and point; step -1 is the answer."""
    rows: Rows = []
    seeds = {name: [recipes[name], *recipes["again"][name]] for name in ("paper", "auto", "importance")}
    for name, seed, found in ((name, *each) for name, own in seeds.items() for each in enumerate(own)):
        errors = torch.cat([found["errors"], found["final_errors"][None]])
        correlations = torch.cat([found["correlations"], found["final_correlations"][None]])
        shared = {"task": task, "recipe": name, "seed": seed} | {
            key: found[key] for key in ("batch_size", "num_steps", "passes")
        }
        rows += [
            shared
            | {"point": point, "step": step, "error": float(error[point]), "pearson": float(pearson[point])}
            | {"promised": float(found["promised"][point]), "diverged_at": found["diverged"]}
            for step, error, pearson in zip([*found["steps"], -1], errors, correlations, strict=True)
            for point in range(errors.shape[1])
        ]
    return rows


# ------------------------------------------------------------------------------------ judge
NOT_HERE = "No task of this run has this panel."
REACHED = 0.95  # of its own plateau, the mean over the later half of the steps: there a curve has converged
REFUSED = "No plateau to reach or to compare: LiSSA diverges."
PANELS = ("converges", *(f"{name}-{size}" for name in ("faster", "closer") for size in ("recommended", "double")))
# Each of them over the correlation with the exact solution, and between steps: with the own last one.
CORRELATIONS = {"": "pearson", "steps-": "pearson_last"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge what is said of batch sizes, for every task: intervals are over seeds, whose points share batches."""
    results, table = list[ClaimResult](), computed["table"]
    for task, own in table.groupby("task", sort=False):
        for prefix, column in CORRELATIONS.items():
            results += _batch_sizes(claims, str(task), prefix, own, column)
    if table.empty:
        names = [(f"{prefix}{name}", name.rpartition("-")[2]) for prefix in CORRELATIONS for name in PANELS]
        lacking = [claims.claim(name, of="batch-sizes", size=size) for name, size in names]
        results += [out_of_reach(claim, NOT_HERE) for claim in lacking]
    return results


def _batch_sizes(
    claims: ClaimSheet, task: str, prefix: str, own: pd.DataFrame, column: str
) -> Iterator[ClaimResult]:
    """Yield the claims of one task on one of the correlations."""
    found, data, facts = _by_seed(own, column), _data(own), _overflows(own)
    double, recommended, small = sorted(own.batch_size.unique(), reverse=True)
    why = "" if prefix else f"The plain gradient, step 1, correlates by {own[own.step == 1][column].mean():.2f}. "
    level = "plateau" if prefix else "best"
    small_level = found[level][small].mean()
    tenth = f"has {small_level:.2f}" if math.isfinite(small_level) else "overflows in every run"
    why += (
        f"Sampling noise of the last iterates remains, or C = 2 is too small here (a tenth of the batch {tenth}): "
        f"the panel on recipes has C measured. {facts}"
    )
    yield _over_seeds(claims.claim(f"{prefix}converges", of=task), found.end[recommended].fillna(0.0), why)
    for name, size in (("recommended", recommended), ("double", double)):
        steps, levels = ({n: found[what][n] for n in (size, small)} for what in ("steps", level))
        invalid = bool(own[own.batch_size.isin([size, small])].overflow.any())
        listed = {n: ", ".join(f"{step:.0f}" for step in own_steps) for n, own_steps in steps.items()}
        why = (
            f"Steps by seed: {listed[size]} with |B| = {size}, {listed[small]} with |B| = {small}; recorded are "
            f"{', '.join(str(step) for step in sorted(own.step.unique())[:8])}, ... {data}{facts}"
        )
        claim = claims.claim(f"{prefix}faster-{name}", of=task, size=name)
        if invalid:
            yield out_of_reach(claim, f"{REFUSED} {facts}")
        else:
            logs = np.log(steps[small].to_numpy() / steps[size].to_numpy())  # whose interval is that of the ratio
            interval = t_interval(logs).mapped(math.exp)
            yield judge_claim(claim, math.exp(logs.mean()), interval, if_not_reproduced=why)
        claim = claims.claim(f"{prefix}closer-{name}", of=task, size=name)
        if invalid and prefix:
            yield out_of_reach(claim, f"{REFUSED} {facts}")
            continue
        why = (
            f"The {level} is {levels[size].mean():.3f} with |B| = {size} and {levels[small].mean():.3f} with "
            f"|B| = {small} averaged. {data}{facts}"
        )
        yield _over_seeds(claim, levels[size] - levels[small], why)


def _by_seed(own: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return, over points, `plateau`, `steps` to it, where a run ends (`end`) and `best`, by batch size and seed.

    `best` is the highest mean at a step at which all points are finite. The plateau is the mean over the later
    half of the steps; `steps` is the first recorded step with REACHED of it, else the last. With its own last step
    every run correlates by 1: `end` is the plateau there.
    """
    means = own.groupby(["batch_size", "seed", "step"])[column].agg(lambda of: of.mean(skipna=False))
    curves = means.unstack("step")
    last = curves.columns.max()
    late = curves[[step for step in own.step.unique() if 2 * step >= last != step]]
    plateau = late.mean(axis=1, skipna=False)
    reached = curves.ge(REACHED * plateau, axis=0).mul(plateau > 0, axis=0)
    steps = reached.idxmax(axis=1).where(reached.any(axis=1), last)
    end = curves[last] if column == "pearson" else plateau
    return pd.DataFrame({"plateau": plateau, "steps": steps, "end": end, "best": curves.max(axis=1)})


def _over_seeds(claim: Claim, values: pd.Series, why: str) -> ClaimResult:
    why = f"By seed: {', '.join(f'{value:.3g}' for value in values)}. {why}"
    return judge_claim(claim, *stats.mean(values), if_not_reproduced=why)


def _data(own: pd.DataFrame) -> str:
    """Say how much data a step of each takes; batch sizes that ten does not divide do not come out alike."""
    sizes = own.groupby("batch_size").num_runs.first()
    listed = ", ".join(f"{size} x {runs}" if runs > 1 else f"{size}" for size, runs in sizes.items())
    return f"Examples in a step: {listed}. "


def _overflows(own: pd.DataFrame) -> str:
    last = own[own.step == own.step.max()]
    counts = ", ".join(
        f"{int(group.overflow.sum())} with |B| = {size}" for size, group in last.groupby("batch_size")
    )
    return f"Not finite at the end, of {last.seed.nunique() * last.point.nunique()} runs each: {counts}."


# ------------------------------------------------------------------------------------ draw
RECIPES = {"paper": "C = 2", "auto": "C measured", "importance": "C = 2, by importance"}
ROLES = (
    "twice the recommended batch",
    "LiSSA, the recommended batch",
    "a tenth of it, mean of 10 runs",
    "one of these runs",
)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name; each where a task is in it."""
    table = computed["table"]
    if table.empty:
        return {}
    names = reader_names(table.task.unique(), whole=True)
    between = computed["between_steps"].replace({"task": names})
    losses = computed["summary"].replace({"task": names}).set_index("task")["train loss"]
    return {"figure.png": _curves(table.replace({"task": names}), losses), "figure_more.png": _heat_maps(between)}


def _curves(table: pd.DataFrame, losses: pd.Series) -> Figure:
    """Draw a panel for each task: correlation with the exact solution over steps, for each batch size."""
    num_tasks = table.task.nunique()
    figure, axes = plots.figure(1, num_tasks, panel_size=(3.4 if num_tasks > 1 else 7.9, 3.9), sharey=True)
    lowest = table.groupby(["task", "batch_size", "step"])[["pearson", "pearson_one_run"]].mean().min().min()
    styles: Any = panels.styles_of(ROLES)
    look: dict[str, Any] = {"styles": styles, "markevery": 4, "linewidth": 1.5}
    for ax, (task, own) in zip(axes[0], table.groupby("task", sort=False), strict=True):
        sizes = own.batch_size.unique().tolist()
        # Points share batches: their mean is one value of a seed.
        means = own.groupby(["batch_size", "seed", "step"], as_index=False, sort=False).mean(numeric_only=True)
        means = means.assign(role=[ROLES[sizes.index(size)] for size in means.batch_size])
        panels.lines(ax, means, x="step", y="pearson", by="role", **look)
        alone = means[means.num_runs > 1]
        panels.lines(ax, alone, x="step", y="pearson_one_run", label=ROLES[3], **look)
        panels.rule(ax, y=1, linestyle="-")
        network, _, state = str(task).partition(", ")
        title = f"{network}\n{state}{', ' * bool(state)}loss {losses[task]:.2g}\n"
        title += "|B| = " + ", ".join(f"{size:.0f}" for size in sizes)
        panels.frame(ax, x="step", title=title, log="x", size=8.5)
        ax.set_ylim(np.floor(2 * lowest) / 2, 1.08)
    axes[0, 0].set_ylabel("correlation of influences\nwith the exact solution's")
    number = panels.seeds(table.groupby("task").seed.nunique())
    note = f"mean over {number}, band: 95 % t interval; |B| from the largest"
    paper = "the paper has no exact solution, so no value here: its steps correlate with one another (more: ours)"
    panels.legend(figure, columns=2, title=f"{note}\n{paper}")
    return figure


def _heat_maps(between: pd.DataFrame) -> Figure:
    """Draw a row for each task: correlation between steps for each batch size."""
    num_sizes = int(between.groupby("task").batch_size.nunique().max())
    figure, rows = panels.rows(between, "task", columns=num_sizes, panel_size=(2.6, 2.7))
    lowest = max(-1.0, np.floor(10 * np.nanmin([between.pearson.min(), 0.9])) / 10)  # the same colours in all
    for axes, task, maps in rows:
        for ax, (size, matrix) in zip(axes, maps.groupby("batch_size", sort=False), strict=False):
            image, runs = _heat_map(ax, matrix, lowest), int(matrix.num_runs.iloc[0])
            ax.set_title(f"|B| = {size}" + (f", mean of {runs} runs" if runs > 1 else ""), fontsize=9)
        axes[0].set_ylabel(f"{textwrap.fill(str(task), 26)}\nstep", fontsize=9)
        figure.colorbar(image, ax=list(axes), label="correlation", shrink=0.8, pad=0.01)
    return figure


def _heat_map(ax: Axes, matrix: pd.DataFrame, lowest: float) -> Any:
    """Draw the correlations of all pairs of steps, as wide as the steps are apart."""
    both = pd.concat([matrix, matrix.rename(columns={"step": "other_step", "other_step": "step"})])
    values = both.pivot_table("pearson", "step", "other_step", dropna=False)
    edges = np.array([0, *values.index], dtype=float)
    ax.set_facecolor("#d9d9d9")  # grey, where nothing is finite: no correlation has this color
    mesh = ax.pcolormesh(edges, edges, np.ma.masked_invalid(values), vmin=lowest, vmax=1, cmap="viridis")
    share = float(matrix[matrix.other_step == matrix.step.max()].overflow.iloc[0])
    ax.set_aspect("equal")
    ax.grid(visible=False)
    panels.frame(ax, x=f"step ({share:.0%} overflow by the last)" if share > 0 else "step", y="step")
    return mesh
