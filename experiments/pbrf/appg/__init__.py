"""Conjugate gradients, LiSSA and the s_test trick at equal cost (Bae et al. 2022, App. G).

make pbrf-appg PRESET=smoke|embedded|laptop|paper ARGS="damping=0.01 lissa.num_steps=500"

Right-hand sides are gradients of training points at θ^s of networks as in pbrf-tab5; matrices are G + damping
and, for some tasks, the Hessian with a damping that makes it positive definite. Every iterate is compared with a
tight reference: relative error, and correlation of the scores (over test examples) with the exact ones. Cost is
counted for each system in products with the matrix of the whole data, a batch as |B| / N of one, set-up included.
That is the same for all methods, but it is not time: a small batch takes longer than its share (step_time.csv).

CG is truncated and damped as in Eq. 47. LiSSA is Eq. 49 with the smallest scaling σ of Sec. C.2's list with which
no repeat is seen to diverge; smaller ones that were tried are not in its cost. A σ just below the limit of
stability, (λmax + damping) / 2, may pass; the claims name such seeds and leave them out. Its batch size is not
stated: here that of training in Sec. C.3, 128, or what the config says. Beside them stand block CG, curvlab's
default solver and `Lissa.auto`, whose C is measured.

Misprints: Eq. 48 and 49 must start at t = 0, else the limit lacks v / σ (for v a top eigenvector and σ its
eigenvalue, everything). With powers t of the matrix of one batch (r, t), Eq. 49 tends to the mean over batches of
(H_B + damping)⁻¹ v; what is meant, and run, is the product of matrices of t different batches. Both are exact
claims here (formulas.py). Where the recursion is begun at u = v / σ, it has the term t = 0; `Lissa` begins at 0,
one step earlier.

s_test (Eq. 50): scores of all training on all test points, by solving for one side or the other; each side's
systems by the same CG, in chunks of the same size. Seconds are CPU seconds of this process, and vary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Computed, Run, Target, panels, plots, t_interval, task_settings, unit
from experiments.pbrf.appg.claims import judge  # noqa: F401  this target's
from experiments.pbrf.appg.formulas import formula_rows
from experiments.pbrf.appg.seconds import s_test_rows, step_rows
from experiments.pbrf.appg.summary import CORRELATION, at_equal_cost, ends
from experiments.pbrf.appg.systems import NetworkSystems
from experiments.pbrf.appg.trajectories import METHODS, trajectory
from experiments.pbrf.networks import Network, load_network

TARGET = Target(
    __name__,
    title="CG, LiSSA and the s_test trick: accuracy against cost",
    paper={
        "seeds": "not stated",
        "num_points": "20 (Sec. C.2)",
        "num_test": "not stated; of ours all there are, 103 of Concrete, 77 of Energy, 133 of diabetes",
        "damping": "0.001",
        "lissa.batch_size": "not stated",
        "lissa.num_steps": "5000 or 10000",
        "lissa.num_repeats": 5,
        "cg.max_steps": "truncated, no number",
        "table.csv:scale": "smallest of 10 to 500 that converges",
        "s_test.num_points": "the training set",
        "s_test.num_test": "much smaller",
    },
    after=("pbrf/tab5",),
    curves=("curves: correlation over work by curvature, method",),
)
Row = dict[str, Any]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables.

    `curves`: a row for each task, curvature, seed, method and recorded iterate: work (products with the whole data
    for each system), and over the systems the median and the worst of error and correlation. `table`: the ends of
    the curves, over seeds. `equal_cost`: what each method has reached at the same cost. `states`: spectra,
    dampings, residuals of the references, LiSSA's scalings. `formulas`, `step_time`, `s_test`: see their modules.
    """
    tables: dict[str, list[Row]] = {
        name: [] for name in ("curves", "states", "solvers", "formulas", "step_time", "s_test")
    }
    seeds: set[int] = set()
    for name, settings in task_settings(cfg).items():
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            for curvature in settings.curvatures:
                for table, rows in _solved(NetworkSystems.of(network, curvature), seed).items():
                    tables[table] += rows
            if settings.s_test.measured:
                tables["s_test"] += s_test_rows(NetworkSystems.of(network, "gauss_newton"))
            if seed == settings.seeds[0]:
                if settings.step_time.measured:
                    tables["step_time"] += step_rows(NetworkSystems.of(network, "gauss_newton"))
                if settings.formulas.measured:
                    key: Any = OmegaConf.to_container(settings.formulas)
                    tables["formulas"] += _formulas(run, network, data=network.key["data"], settings=key)["rows"]
            seeds.add(seed)
    run.note(seeds=sorted(seeds), threads=torch.get_num_threads())
    found = {name: pd.DataFrame(rows) for name, rows in tables.items()}
    solvers = found.pop("solvers")
    return {
        "table": ends(found["curves"], found["states"], solvers),
        "equal_cost": at_equal_cost(found["curves"], list(cfg.costs)),
        **{name: table for name, table in found.items() if not table.empty},
    }


def _solved(systems: NetworkSystems, seed: int) -> dict[str, list[Row]]:
    """Return rows of `states`, `solvers` and `curves` of one network and matrix."""
    network, settings = systems.task, systems.task.settings
    names = {"task": network.label, "curvature": systems.matrix, "seed": seed}
    state = names | {
        "P": systems.operator.shape[0],
        "N": systems.operator.num_examples,
        "largest eigenvalue": systems.spectrum["largest"],
        "smallest eigenvalue": systems.spectrum["smallest"],
        "damping asked for": float(settings.damping),
        "damping": systems.damping,
        "reference residual": systems.reference["residual"],
    }
    curves: list[Row] = []
    solvers: list[Row] = []
    for method in settings.methods[systems.matrix]:
        if method == "lissa_auto" and seed not in settings.auto_seeds:
            continue
        found = trajectory(systems, method)
        sizes = {name: found[name] for name in ("batch_size", "num_steps", "scale") if name in found}
        if "tried" in found:
            state[f"{METHODS[method]} scale"] = found["scale"]
            state[f"{METHODS[method]} tried before"] = "; ".join(found["tried"])
        for label, curve in found["curves"].items():
            own = names | {"method": label}
            solvers.append(own | sizes)
            curves += [own | row for row in _curve_rows(curve)]
    return {"states": [state], "solvers": solvers, "curves": curves}


def _curve_rows(curve: Row) -> list[Row]:
    """Return one row for each recorded iterate: over the systems, the median and the worst."""
    return [
        {
            "work": work,
            "error": float(errors.median()),
            "error_worst": float(errors.max()),
            "correlation": float(correlations.median()),
            "correlation_worst": float(correlations.min()),
        }
        for work, errors, correlations in zip(curve["work"], curve["errors"], curve["correlations"], strict=True)
    ]


@unit("pbrf/appg_formulas", version=1, about="Eq. 48 and 49 on linear regression")
def _formulas(_: Run, network: Network, /, *, settings: Row, **_key: Any) -> Row:
    return {"rows": formula_rows(network.train[0].cpu(), settings)}


# ------------------------------------------------------------------------------------ draw
FLOOR = 1e-7  # of 1 - correlation: below it is rounding
NOTE = (
    f"median over the systems, mean over seeds, band: 95 % t interval; dotted: a correlation of {CORRELATION:g},\n"
    "good enough; dot: the last step; a batch counts as |B| / N of a product, which is not time"
)
TITLES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return errors against cost of the first network and matrix, and of all."""
    curves, states = computed["curves"], computed["states"]
    places = list(curves.groupby(["task", "curvature"], sort=False))
    styles = {str(name): style for name, style in panels.styles_of(curves.method.unique()).items()}
    figures = {}
    for name, shown, height in (("figure.png", places[:1], 3.8), ("figure_more.png", places, 2.4)):
        figure, axes = plots.figure(len(shown), 2, panel_size=(3.8, height))
        for row, ((task, curvature), own) in zip(axes, shown, strict=True):
            _curves(row[0], own, "correlation", styles)
            _curves(row[1], own, "error", styles)
            panels.rule(row[0], y=1 - CORRELATION, linestyle=":")
            chosen = states[(states.task == task) & (states.curvature == curvature)]
            title = f"{task}, {TITLES[str(curvature)]}, damping {chosen.damping.mean():.2g}"
            row[0].set_title(f"{title}, {panels.seeds([own.seed.nunique()])}", fontsize=9, loc="left")
            for ax, label in zip(row, ("1 − correlation of scores", "relative error"), strict=True):
                panels.frame(ax, x="products with the whole data", y=label)
        drawn = {method for _, own in shown for method in own.method}
        handles = [
            axes[0, 0].plot([], [], **style, label=_label(curves, name))[0]
            for name, style in styles.items()
            if name in drawn
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, title=NOTE)
        figures[name] = figure
    return figures


def _label(curves: pd.DataFrame, method: str) -> str:
    """Return the method's name, with its seeds where in every panel there are fewer than of others."""
    own = curves[curves.method == method].groupby(["task", "curvature"]).seed.nunique()
    fewer = own < curves.groupby(["task", "curvature"]).seed.nunique().reindex(own.index)
    return f"{method} ({panels.seeds(own)})" if fewer.all() else method


def _curves(ax: Axes, own: pd.DataFrame, quantity: str, styles: dict[str, dict]) -> None:
    """Draw a line for each method: the median system, mean over seeds of its logarithm, with 95 % of t."""
    for method, curve in own.groupby("method", sort=False):
        grid = _grid(curve)
        values = np.array([_at(rows, quantity, grid) for _, rows in curve.groupby("seed")])
        if quantity == "correlation":
            values = np.clip(1 - values, FLOOR, None)
        logs = np.log(values)
        mean = np.exp(logs.mean(0))
        ax.plot(grid, mean, linewidth=1.3, **styles[str(method)] | {"marker": ""})
        ax.plot(grid[-1:], mean[-1:], marker="o", markersize=4, color=styles[str(method)]["color"])
        if len(values) >= 2:
            ends = [t_interval(column) for column in logs.T]
            low, high = (np.exp([getattr(end, side) for end in ends]) for side in ("low", "high"))
            ax.fill_between(grid, low, high, color=styles[str(method)]["color"], alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    if quantity == "error":
        ax.set_ylim(top=3)
    else:
        ax.set_ylim(FLOOR / 2, 3)


def _grid(curve: pd.DataFrame) -> np.ndarray:
    """Return costs at which every seed has an iterate, from the latest first one to the earliest last one."""
    by_seed = curve.groupby("seed").work
    first, last = by_seed.min().max(), by_seed.max().min()
    longest = curve[curve.seed == curve.groupby("seed").work.size().idxmax()].work.to_numpy()
    return np.unique([first, *longest[(longest > first) & (longest < last)], last])


def _at(rows: pd.DataFrame, quantity: str, grid: np.ndarray) -> np.ndarray:
    places = np.searchsorted(rows.work.to_numpy() * (1 - 1e-9), grid, side="right") - 1
    return rows[quantity].to_numpy()[places]
