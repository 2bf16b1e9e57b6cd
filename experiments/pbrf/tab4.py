"""The five gaps with the Hessian in the place of the Gauss-Newton matrix (Bae et al. 2022, Table 4).

make pbrf-tab4 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5"

The first four gaps do not depend on the influence estimate: they are those of pbrf-tab5, from the same units of
work. The linearised response is a descent towards the estimate with the Gauss-Newton matrix, so "solver" has the
difference of the two matrices in it.

The paper's estimate is LiSSA of depth 5,000, with a scaling σ tuned from a list; its claims are judged by that,
each matrix with the scaling of the list whose solver error is least, since the paper prints none. It is a descent
of length 5,000/σ, cut off as the linearised response is. The exact solve is another estimate, and has a claim of
ours: the Hessian with damping is not definite at these θ^s, hundreds of eigenvalues lie below -λ and some next to
it, so that it is the stationary point of a saddle. The table and `networks` have the exact one, or
nan where it is not computed (`hessian_seeds`; laptop computes none), and the bars show LiSSA then;
`curvatures` has the solver error of all estimates with either matrix on the same points, and, at up to 5,000
parameters, the exact ones at a damping of 2 |μ_min|, which makes the matrix definite: what is left of the
difference there is not the saddle's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, load_paper_numbers
from curvlab.lab.claims import ClaimResult, ClaimSheet, exact, out_of_reach, t_interval
from curvlab.lab.claims import judge as judge_claim
from experiments.papers import FOLDER
from experiments.pbrf import gaps as five_gaps
from experiments.pbrf.gaps import arrived, arrived_row, by_point, gap_tables, judge_over_seeds, mean_ratio
from experiments.pbrf.responses import CURVATURES, DENSE, EXACT, Decomposition, rows_of_networks

TARGET = Target(
    __name__,
    title="Five gaps, influence with the Hessian",
    paper={
        "num_points": 20,
        "seeds": "not stated",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "table.csv:epochs": 1000,
        "lissa.num_steps": 5000,
        "lissa.batch_size": "not stated; mean of 5 repeats. None: the exact mean of such runs, nothing repeated",
    },
    after=("pbrf/tab5",),
    digits={"curvatures": 4},  # a row for each point and estimate
)
MATRICES = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton"}
PRINTED = {"Hessian": "Table 4", "Gauss-Newton": "Table 5"}  # the paper's, by LiSSA
OTHERS = ["warm_start", "proximity", "non_convergence"]  # linearisation: 0.000 in all of the paper's rows


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `points` and `networks`, see `gap_tables`, and `curvatures`: solver errors, point by point.

    `curvatures` has the solver error by either matrix at the damping of the table: of the exact estimate, of LiSSA
    at each scaling, and of the filter of the PBRF's own length (`estimate`; nan where LiSSA is not finite). Of
    networks whose Hessian's eigenvalues are all known also the exact ones at a damping that makes H + λI definite:
    2 |μ_min|, in one digit. `moved` is how far the estimate moves the outputs; `definite` tells the dampings
    apart.
    """
    found = gap_tables(run, cfg, "hessian", "Table 4")
    return found | {"curvatures": pd.DataFrame(rows_of_networks(run, cfg, _solver_errors))}


def _solver_errors(found: Decomposition) -> Iterator[dict[str, Any]]:
    variations = [(False, found)]
    smallest = found.hessian_spectrum()["smallest"]
    if len(found.network.initial) <= DENSE and smallest < 0:
        variations.append((True, found.with_damping(float(f"{-2 * smallest:.0e}"))))
    for definite, variation in variations:
        for curvature in CURVATURES:
            place = {"curvature": curvature, "definite": definite, "damping": variation.network.settings.damping}
            errors, residuals = {}, {}
            if variation.is_solved(curvature):
                own_ends = (("linearised", curvature), (curvature, "base"))
                errors = {EXACT: tuple(variation.distance(*ends) for ends in own_ends)}
                residuals = {EXACT: variation.influence(curvature)[1]}
            if not definite:
                errors |= {name: (own["solver"], own["moved"]) for name, own in found.truncated(curvature).items()}
            for name, (solver, moved) in errors.items():
                own = place | {"residual": residuals.get(name, np.nan), "estimate": name}
                for point, error, move in zip(found.points, solver[:, 0], moved[:, 0], strict=True):
                    yield own | {"point": int(point), "solver": float(error), "moved": float(move)}


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task over its seeds, see `judge_over_seeds`: LiSSA, and beside it the exact solve."""
    table, curvatures, results = computed["table"], computed["curvatures"], []
    for task, own in computed["points"].groupby("task", sort=False):
        row, gaps = table[table.task == task].iloc[0], by_point(own)
        results += _judge_task(claims, str(task), row, gaps, curvatures[curvatures.task == task])
    return [*results, _judge_printed(claims)]


def _judge_printed(claims: ClaimSheet) -> ClaimResult:
    """Judge the paper's sentence on its own table."""
    others = [_printed("Table 4", column) for column in OTHERS]
    ratios = {row: solver / min(other[row] for other in others) for row, solver in _printed("Table 4").items()}
    why = f"By row: {', '.join(f'{row} {ratio:.2g}' for row, ratio in ratios.items())}."
    worst = max(ratios.values())
    return judge_claim(
        claims.claim("printed-still-lower"), worst, exact(worst, kind="printed"), if_not_reproduced=why
    )


def over_smallest(solver: np.ndarray, *others: np.ndarray) -> float:
    """Return the mean solver error over the smallest of the other means."""
    return float(np.mean(solver) / min(np.mean(other) for other in others))


def best_scalings(curvatures: pd.DataFrame) -> dict[str, str]:
    """Return the LiSSA that each matrix's solver error is least with, by matrix; those finite in every seed."""
    of_lissa = curvatures[~curvatures.definite & curvatures.estimate.str.startswith("LiSSA")]
    means = of_lissa.groupby(["curvature", "estimate"]).solver.agg(lambda own: own.mean(skipna=False)).dropna()
    return {str(matrix): str(own.droplevel(0).idxmin()) for matrix, own in means.groupby(level="curvature")}


def _judge_task(
    claims: ClaimSheet, task: str, row: pd.Series, gaps: pd.DataFrame, both: pd.DataFrame
) -> list[ClaimResult]:
    solved, best = _pair(both, dict.fromkeys(CURVATURES, EXACT)), best_scalings(both)
    state = _state(row, solved, both[both.definite])
    claim = claims.claim("exact-grows", of=task)
    if len(solved):
        results = [judge_over_seeds(claim, arrived_row(row), solved, mean_ratio, state)]
    else:
        results = [out_of_reach(claim, "The exact solve with the Hessian is not computed at this preset.")]
    paper = {
        name: claims.claim(name, of=task) for name in ("solver-error-grows", "grows-only-slightly", "still-lower")
    }
    if set(best) != set(CURVATURES):
        reason = arrived(learned=bool(row.learned), is_exact=False, residual=np.nan)
        if not len(both[both.estimate != EXACT]):
            reason = "LiSSA is not computed at this preset."
        return results + [out_of_reach(claim, reason) for claim in paper.values()]
    pair, reason = _pair(both, best), arrived(learned=bool(row.learned), is_exact=False)
    lissa = (
        f"With {best['hessian']} for the Hessian, {best['gauss_newton']} for the Gauss-Newton matrix. {_all(both)}"
    )
    others = pair[["hessian"]].join(gaps[OTHERS])
    moved = pair[["hessian"]].assign(hessian=gaps["moved by linearised"]).join(gaps[OTHERS])
    zero = over_smallest(*(moved[name].to_numpy() for name in moved))
    for name, columns, statistic in (
        ("solver-error-grows", pair, mean_ratio),
        ("grows-only-slightly", pair, mean_ratio),
        ("still-lower", others, over_smallest),
    ):
        why = f"{lissa} An influence of zero would score {zero:.2g}." if name == "still-lower" else lissa
        results.append(judge_over_seeds(paper[name], reason, columns, statistic, why))
    return results


def _pair(curvatures: pd.DataFrame, estimates: dict[str, str]) -> pd.DataFrame:
    """Return the solver errors with either matrix, a row for each seed and point: the estimate of each matrix."""
    own = curvatures[~curvatures.definite & (curvatures.estimate == curvatures.curvature.map(estimates))]
    table = own.pivot_table(index=["seed", "point"], columns="curvature", values="solver", sort=False)
    return table.reindex(columns=["hessian", "gauss_newton"]).dropna()  # seeds that both are solved for


def _all(curvatures: pd.DataFrame) -> str:
    """Say the mean solver error of every estimate."""
    means = curvatures[~curvatures.definite].groupby(["estimate", "curvature"], sort=False).solver
    table = means.agg(lambda own: own.mean(skipna=False)).unstack()
    text = table.map(lambda value: f"{value:.2g}" if np.isfinite(value) else "none")
    listed = "; ".join(f"{name} {own.hessian}, {own.gauss_newton}" for name, own in text.iterrows())
    return f"Mean solver errors (Hessian, Gauss-Newton): {listed}."


def _state(row: pd.Series, pair: pd.DataFrame, definite: pd.DataFrame) -> str:
    """Say what the exact solver errors are made of: the saddle, and what is left without it."""
    text = (
        f"Mean solver errors: {pair.hessian.mean():.2g} with the Hessian (residual {row.residual:.1g}), "
        f"{pair.gauss_newton.mean():.2g} with the Gauss-Newton matrix; gradient norm at θ^s "
        f"{row['gradient norm']:.2g}. The smallest eigenvalue of the Hessian is {row['smallest eigenvalue']:.2g}, "
    )
    if np.isfinite(row["eigenvalues below -λ"]):
        nearest = row["min |μ + λ|"]
        near = f", and min |μ + λ| is {nearest:.1g}" if np.isfinite(nearest) else ""
        text += (
            f"{row['eigenvalues below -λ']:.0f} of {row.P:.0f} are below -λ{near} (means over seeds): the "
            "estimate is a saddle's, not a minimum's."
        )
    else:
        text += "by Lanczos, from above; the others are not known."
    if len(definite):
        means = definite.groupby("curvature").solver.mean()
        text += (
            f" At dampings of {', '.join(f'{damping:g}' for damping in sorted(definite.damping.unique()))}, where "
            f"H + λI is definite, the two are {means.hessian:.2g} and {means.gauss_newton:.2g}, a ratio of "
            f"{means.hessian / means.gauss_newton:.2g}."
        )
    return text


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the gaps of the rows nearest to the paper's, and of all, beside others' solver errors."""
    table, curvatures = computed["table"], computed["curvatures"]
    means = curvatures[~curvatures.definite].groupby(["task", "curvature", "estimate", "seed"], sort=False)
    solver = means.solver.agg(lambda own: own.mean(skipna=False)).reset_index()
    solver["scale"] = pd.to_numeric(solver.estimate.str.extract(r"σ = (\d+)")[0])
    solver["matrix"] = solver.curvature.map(MATRICES)
    more, table = pd.DataFrame(_others(solver)), _by_lissa(table, curvatures)
    # The paper's are by LiSSA: beside ours, where the exact solution stands in the row above.
    rows = table["paper's row"].replace("", np.nan).fillna(table["stands for"])
    printed = {matrix: rows.map(_printed(number)).set_axis(table.task) for matrix, number in PRINTED.items()}
    for matrix, of_task in printed.items():
        by_lissa = more.name == f"… LiSSA, {matrix}"
        more.loc[by_lissa, "paper"] = more[by_lissa].task.map(of_task).clip(lower=five_gaps.SMALLEST).astype(float)
    moved = more[more.name == f"… LiSSA, {MATRICES['hessian']}"].task
    table.loc[table.task.isin(moved), "solver paper mean"] = np.nan
    own, figures = f", exact, {MATRICES['hessian']}", {}
    for name, shown, size in (("figure.png", five_gaps.nearest(table), 4.6), ("figure_more.png", table, 3.0)):
        figures[name] = five_gaps.gap_figure(shown, five_gaps.MOST, size, more, solver=own)
        for ax, task in zip(figures[name].axes, shown.task, strict=True):
            both = [f"{matrix} {of_task[task]:.3f}" for matrix, of_task in printed.items()]
            paper = f"\nthe paper's: {', '.join(both)}" if np.isfinite(printed["Hessian"][task]) else ""
            ax.set_title(ax.get_title() + paper, fontsize=8.5)
    return figures


def _printed(table: str, column: str = "solver") -> dict[str, float]:
    """Return a column of a table of the paper, by its rows."""
    numbers = load_paper_numbers("pbrf", folder=FOLDER).in_table(table)
    return {number.row: number.value for number in numbers if number.column == column}


def _by_lissa(table: pd.DataFrame, curvatures: pd.DataFrame) -> pd.DataFrame:
    """Return `table` with LiSSA's solver error where the Hessian's exact estimate is not computed."""
    table = table.copy()
    for place, task in table[table["solver per_example mean"].isna()].task.items():
        own = curvatures[(curvatures.task == task) & (curvatures.curvature == "hessian")]
        own = own[own.estimate == best_scalings(own).get("hessian")]
        means = own.groupby("seed").solver.mean()
        interval, columns = t_interval(means), [f"solver per_example {end}" for end in ("mean", "low", "high")]
        table.loc[place, columns] = [means.mean(), interval.low, interval.high]
        table.loc[place, ["estimate", "residual", "moved"]] = [five_gaps.LISSA, 0.0, own.moved.mean()]
    return table


def _others(solver: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield each task's solver errors with the Gauss-Newton matrix, and by LiSSA at the best scaling of each."""
    for task, own in solver.groupby("task", sort=False):
        exact = own[(own.estimate == EXACT) & (own.curvature == "gauss_newton")]
        found = {f"… exact, {MATRICES['gauss_newton']}": exact}
        solved = bool(len(own[(own.estimate == EXACT) & (own.curvature == "hessian")]))
        for matrix, best in best_scalings(own.assign(definite=False)).items():
            if matrix == "hessian" and not solved:
                continue  # it is the table's own, see `_by_lissa`
            found[f"… LiSSA, {MATRICES[matrix]}"] = own[(own.curvature == matrix) & (own.estimate == best)]
        for name, rows in found.items():
            interval = t_interval(rows.solver)
            place = {"task": task, "name": name, "curvlab": "curvlab", "value": rows.solver.mean()}
            yield place | {"low": interval.low, "high": interval.high, "paper": np.nan}
