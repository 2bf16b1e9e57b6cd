"""Uniform directions on logistic regression (Semenov 2025, the experiments on mushrooms, 112 x 112).

make rank1-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=mushrooms l2=1e-4"

Gradient norm and f - f* from x = 0 for: α_k of the lemma, with σ times 1 (the Proposition), 0.1, ..., 0; two other
rules for α_k, `measured` (M and λ as estimated along the path) and `constant`; shifts δ; S or D, with and without
safeguard; means over several directions; beside gradient descent, Newton's method and cubic Newton. The slides
show four such plots without their settings in the text, and no number. M and λ are global constants in closed form
(λ = λmax(AᵀA/N)/4 + l2) unless measured; l2 makes the minimum unique (mushrooms can be separated).

With one direction and given constants a step costs one Hessian product. table.csv holds the curves at about 60
steps each; further.csv a longer run of the lemma's own variant; timing.csv and cost.csv seconds, which no
repetition reproduces.

The only statement behind the slides' figures is that the method converges. What else these runs show is in
summary.csv: whether f ever rises, what gradient descent reaches in as many steps, S against D, several directions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, Target, exact, panels, plots, unit
from curvlab.lab import judge as verdict
from curvlab.linalg import LinearOperator
from curvlab.optim import UniformDirection, stated_sigma, steps_bound
from experiments.rank1.descent import LEMMA, Trace, descend, make_optimizer
from experiments.rank1.objectives import Objective, logistic_regression
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Uniform directions on logistic regression",
    paper={"further.csv:objective": "logistic, mushrooms, n = 112"}
    | dict.fromkeys(("l2", "num_steps", "num_seeds", "sigma_scales", "lr_factors"), "not stated"),
    digits={"table": 4},  # sixty curves of hundreds of steps
)
OURS = "uniform direction"
SETTINGS = list(LEMMA)
COLUMNS = ["method", *SETTINGS, "lr_factor"]  # that name a variant; empty where a setting does not apply
REACHED = 0.1  # of the first gradient norm: the lemma's variant has converged for the purpose of its claim
NUM_RECORDED = 60
NUM_REPEATS = 5  # of a timing


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table` (curves), `summary` (one row for each variant), `further`, `timing` and `cost`.

    Reads `data`, `l2`, `num_steps`, `num_seeds`, `further_steps`, and what `variants` and `cost_rows` read.
    """
    splits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    objective = logistic_regression(splits, l2=cfg.l2)
    data = {"data": splits.checksum, "l2": cfg.l2}
    rows, timings = [], []
    for method, settings in run.progress(list(variants(cfg)), "variants"):
        for seed in range(cfg.num_seeds if method == OURS else 1):
            what = {"method": method, "settings": settings, "num_steps": cfg.num_steps, "number": seed}
            stored = _curve(run, objective, **data, **what)
            names = {"method": method, **{name: settings.get(name) for name in COLUMNS[1:]}, "seed": seed}
            rows += [names | row for row in stored["rows"]]
            timings.append(names | {"seconds_per_step": stored["seconds"]})
    further = [
        {"objective": objective.name, "seed": seed}
        | _further(run, objective, **data, num_steps=cfg.further_steps, ratio=REACHED, number=seed)
        for seed in range(cfg.num_seeds)
    ]
    run.note(seeds=list(range(cfg.num_seeds)))
    table = pd.DataFrame(rows)
    return {
        "table": table,
        "summary": summary(table),
        "further": pd.DataFrame(further),
        "timing": pd.DataFrame(timings),
        "cost": pd.DataFrame(cost_rows(run, cfg)),
    }


def variants(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (method, settings), each once; settings are those of the lemma unless they say otherwise."""
    forms = [(scale, form, safe) for scale in cfg.form_scales for form in (True, False) for safe in (True, False)]
    counts = [(scale, count) for scale in (1.0, cfg.directions_scale) for count in cfg.directions]
    changes: list[dict[str, Any]] = [
        *({"sigma_scale": scale} for scale in cfg.sigma_scales),
        {"rule": "measured"},
        *({"rule": "constant", "sigma_scale": scale} for scale in (1.0, *cfg.form_scales)),
        *({"sigma_scale": 0.0, "delta_scale": scale} for scale in cfg.delta_scales),
        *({"sigma_scale": scale, "symmetrize": form, "safeguard": safe} for scale, form, safe in forms),
        *({"sigma_scale": c, "num_directions": count, "safeguard": c < 1} for c, count in counts),
    ]
    ours = [LEMMA | change for change in changes]
    yield from ((OURS, own) for place, own in enumerate(ours) if own not in ours[:place])
    yield from (("gradient descent", {"lr_factor": float(factor)}) for factor in cfg.lr_factors)
    yield from (("Newton", {}), ("cubic Newton", {}))


@unit("rank1/logistic", version=1, about="{method} {settings}, seed {number}")
def _curve(
    run: Run, objective: Objective, /, *, method: str, settings: Any, num_steps: int, number: int, **_: Any
) -> dict[str, Any]:
    start = objective.point()
    optimizer = make_optimizer(objective, method, settings, run.generator("directions", number))
    trace = descend(objective, optimizer, num_steps=num_steps, stop_at=1e-12)
    objective.move_to(start)
    run.add_matvecs(trace.num_products[-1])
    rows = recorded(trace, objective)
    if settings.get("rule") == "given":  # the optimizer is given σ and knows no λ
        rows = [row | {"spectral_norm": objective.spectral_norm} for row in rows]
    return {"rows": rows, "seconds": trace.seconds_per_step}


def recorded(trace: Trace, objective: Objective) -> list[dict[str, Any]]:
    """Return rows at steps about evenly spaced on a log scale; the last has the shares over all steps."""
    rows = []
    for row in trace.rows(NUM_RECORDED, optimum=objective.optimum):
        step = row.pop("step")
        paid = trace.num_products[step]
        used = {name: _of_step(trace, step, name) for name in ("alpha", "spectral_norm", "hessian_lipschitz")}
        rows.append({"step": step, "products": paid, "passes": step + paid} | row | used)
    rows[-1] |= trace.shares(objective.spectral_norm or 0.0) | {"diverged": trace.diverged}
    return rows


def _of_step(trace: Trace, step: int, name: str) -> float | None:
    """Return what step k used; at the last point, from which no step was taken, what the last step used."""
    if not trace.directions:
        return None
    value = float(getattr(trace.directions[min(step, len(trace.directions) - 1)], name))
    return None if math.isnan(value) else value


@unit("rank1/logistic-further", version=2, about="{num_steps} steps further, seed {number}")
def _further(
    run: Run, objective: Objective, /, *, num_steps: int, ratio: float, number: int, **_: Any
) -> dict[str, Any]:
    """Return when the lemma's variant reaches the tolerance of its claim, given many more steps."""
    start = objective.point()
    first = float(objective.closure().detach())
    norm = float(objective.parameters[0].grad.norm())  # type: ignore[union-attr]  # left by the closure
    optimizer = make_optimizer(objective, OURS, LEMMA, run.generator("directions", number))
    trace = descend(objective, optimizer, num_steps=num_steps, stop_at=ratio * norm)
    objective.move_to(start)
    run.add_matvecs(trace.num_products[-1])
    sigma = stated_sigma(objective.size, spectral_norm=objective.spectral_norm or 0.0)
    known = {"gradient_norm": norm, "hessian_lipschitz": objective.hessian_lipschitz or 0.0, "sigma": sigma}
    return {
        "relative_epsilon": ratio,
        "steps": len(trace.values) - 1,
        "reached": trace.gradient_norms[-1] <= ratio * norm,
        "gradient_norm_ratio": trace.gradient_norms[-1] / norm,
        "bound": steps_bound(ratio * norm, gap=first - objective.optimum, **known),
    }


class _Diagonal(LinearOperator):
    """diag(1, ..., 2): its product costs next to nothing, so that the step itself is timed."""

    def __init__(self, size: int) -> None:
        super().__init__(size, dtype=torch.float64, device="cpu")
        self.scale = torch.linspace(1, 2, size, dtype=torch.float64)

    def matmat(self, vectors: Tensor) -> Tensor:
        return self.scale[:, None] * vectors


def cost_rows(run: Run, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return CPU seconds of a step by n = `cost_sizes` and directions, and of dense solves to `largest_dense`."""
    rows = []
    for size in run.progress(list(cfg.cost_sizes), "seconds per step"):
        ones = torch.ones(size, dtype=torch.float64)
        for count in (1, 4):
            x, generator = nn.Parameter(ones.clone()), run.generator("cost", size)
            optimizer = UniformDirection(
                [x], _Diagonal(size), alpha=1.0, num_directions=count, generator=generator
            )
            x.grad = ones.clone()
            rows.append({"n": size, "method": f"step, m = {count}", "seconds": _shortest(optimizer.step)})
        if size <= cfg.largest_dense:
            matrix = torch.randn(size, size, dtype=torch.float64, generator=run.generator("dense", size))
            seconds = _shortest(partial(torch.linalg.solve, matrix + size * torch.eye(size), ones))
            rows.append({"n": size, "method": "dense solve", "seconds": seconds})
    return rows


def _shortest(action: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


# ------------------------------------------------------------------------------------ the variants compared
def chosen(table: pd.DataFrame, **settings: Any) -> pd.DataFrame:
    """Return the rows with these settings."""
    for name, value in settings.items():
        table = table[table[name].eq(value)]
    return table


def last_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each run."""
    return table.sort_values("step").groupby([*COLUMNS, "seed"], sort=False, dropna=False).tail(1)


def log_gap(rows: pd.DataFrame) -> pd.Series:
    """Return log10 of f - f*, not below rounding."""
    return rows.gap.astype(float).clip(lower=1e-16).apply(np.log10)


def best_variant(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last rows, by seed, of the one-direction variant of the least mean log10 f - f*, even seeds."""
    single = chosen(last_rows(table), method=OURS, num_directions=1)
    groups = [own for _, own in single.groupby(SETTINGS, sort=False)]
    return min(groups, key=lambda own: float(log_gap(own[own.seed % 2 == 0]).mean())).sort_values("seed")


def variant_name(rows: pd.DataFrame) -> str:
    """Return e.g. "D, c = 0.0001, safeguard"."""
    row = rows.iloc[0]
    rule = "" if row.rule == "given" else f", α {row.rule}"
    delta = f", δ = {row.delta_scale:g} λ" if row.delta_scale else ""
    return f"{'S' if row.symmetrize else 'D'}, c = {row.sigma_scale:g}{rule}{delta}{_safe(row.safeguard)}"


def _safe(safeguard: bool) -> str:
    return ", safeguard" if safeguard else ""


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each variant: its end (median over seeds), its behaviour, and gradient descent beside it.

    `gradient_norm_by_descent` is its last gradient norm over that of gradient descent with step 1/λ;
    `log10_gap_by_descent` log10 of its last f - f* over that of the best step size of gradient descent, mean over
    seeds and its standard error. All after the same number of steps, unless a method ended before.
    """
    last = last_rows(table)
    descent = chosen(last, method="gradient descent")
    standard = float(chosen(descent, lr_factor=1).gradient_norm.iloc[0])
    last = last.assign(
        gradient_norm_by_descent=last.gradient_norm / standard,
        log10_gap_by_descent=log_gap(last) - float(log_gap(descent).min()),
        diverged=last.diverged.astype(int),  # a sum of booleans may be a boolean or a number
    )
    means = ("share_rising", "share_uphill", "share_indefinite", "share_singular")
    found = last.groupby(COLUMNS, sort=False, dropna=False).agg(
        seeds=("seed", "nunique"),
        steps=("step", "max"),
        products=("products", "median"),
        last_gradient_norm=("gradient_norm", "median"),
        last_gap=("gap", "median"),
        gradient_norm_by_descent=("gradient_norm_by_descent", "mean"),
        log10_gap_by_descent=("log10_gap_by_descent", "mean"),
        log10_gap_stderr=("log10_gap_by_descent", "sem"),
        **{name: (name, "mean") for name in (*means, "spectral_norm", "hessian_lipschitz")},
        diverged=("diverged", "sum"),
    )
    return found.reset_index().sort_values("last_gradient_norm")


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge what compares runs; intervals are over seeds."""
    table = computed["table"]
    last = last_rows(table)
    first = float(table[table.step == 0].gradient_norm.iloc[0])
    lemma = chosen(last, method=OURS, **LEMMA).gradient_norm.astype(float) / first
    alike = lemma.nunique() == 1
    interval = exact(lemma.iloc[0], kind="every seed alike") if alike else stats.mean(lemma)[1]
    descent, best = chosen(last, method="gradient descent"), best_variant(table)
    gaps = log_gap(best[best.seed % 2 == 1]) - float(log_gap(descent).min())
    rate = float(descent.lr_factor.iloc[int(log_gap(descent).to_numpy().argmin())])
    num_variants = len(chosen(last, method=OURS, num_directions=1).groupby(SETTINGS))
    compared = (
        f"{variant_name(best)}, of {num_variants} variants, against gradient descent with {rate:g} / λ of "
        f"{len(descent)} rates. The variant is the best in the mean of {len(best) - len(gaps)} other seeds."
    )
    short = (
        "σ grows as λ n, the step is about a gradient step of 1/(λ n), n times too short: lemma-converges-long."
    )
    return [
        verdict(claims.claim("lemma-converges"), float(lemma.mean()), interval, if_not_reproduced=short),
        verdict(claims.claim("best-beats-descent"), *stats.mean(gaps), if_not_reproduced=compared),
    ]


def _except(*names: str) -> dict[str, Any]:
    """Return the lemma's settings but these."""
    return {name: value for name, value in LEMMA.items() if name not in names}


# ------------------------------------------------------------------------------------ draw
NORM = "‖∇f(x_k)‖"
FLOOR = 1e-8  # of the norm
AXES = {"step": "step k", "products": "Hessian products", "passes": "gradients + Hessian products"}
Curves = dict[str, pd.DataFrame]  # rows by legend entry; one with a blank in front is dashed, with two dotted
LINES = ("-", "--", ":")
CUBIC = " cubic Newton"
NOTE = "line: median over {} of the directions; band: smallest to largest of the seeds"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: the methods, and settings of ours."""
    table = computed["table"]
    table = table.assign(**{NORM: table.gradient_norm.clip(lower=FLOOR)})
    return {"figure.png": _convergence(table), "figure_more.png": _settings(table)}


def _convergence(table: pd.DataFrame) -> Figure:
    """Draw what the slides show, the lemma's rule, gradient descent and Newton; and the best of what was tried."""
    curves = _methods(table)
    del curves[CUBIC]  # with the settings
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 3.6))
    for ax, x in zip(axes[0], ("step", "passes"), strict=True):
        _panel(ax, curves, x, NORM)
    last, first = last_rows(curves["lemma"]), table[table.step == 0].gradient_norm.iloc[0]
    end = last.gradient_norm.median()
    share = f"{100 * end / first:.0f} % of the first"
    look: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes[0, 0].annotate(share, xy=(last.step.iloc[0], end), color=panels.COLORS["lemma"], **look)
    note = "best: lowest f - f* at the end, of all variants or rates tried; of uniform direction by the even seeds"
    panels.legend(figure, title=f"{NOTE.format(panels.seeds([table.seed.nunique()]))}\n{note}", columns=3)
    return figure


def _settings(table: pd.DataFrame) -> Figure:
    figure, axes = plots.figure(4, 2, panel_size=(4.0, 2.2))
    ours = chosen(table, method=OURS, rule="given")
    plain = chosen(ours, **_except("sigma_scale"))
    shifted = chosen(ours, **_except("sigma_scale", "delta_scale"), sigma_scale=0)
    shown = [
        *((f"methods by {x}", _methods(table), x) for x in ("step", "passes")),
        ("α_k = sqrt(M‖∇f‖/2) + c σ", _by(plain, "sigma_scale", "c = {:g}"), "step"),
        ("shift δ, σ = 0", _by(shifted, "delta_scale", "δ = {:g} λ"), "step"),
        ("symmetrised (S) or not (D)", _forms(chosen(ours, num_directions=1, delta_scale=0)), "step"),
        *(("m directions, their own σ", _directions(ours), x) for x in ("step", "products")),
    ]
    for ax, (title, curves, x) in zip(axes.flat, shown, strict=False):
        _panel(ax, curves, x, NORM, title)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    axes[-1, -1].set_axis_off()
    note = NOTE.format(panels.seeds([table.seed.nunique()]))
    panels.legend(
        figure, title=f"{note}\nc: factor of σ in the lemma's step; D: estimate not symmetrised", axes=[]
    )
    return figure


def _by(table: pd.DataFrame, column: str, entry: str) -> Curves:
    """Return the rows by value of a setting, largest first."""
    return {
        entry.format(value): chosen(table, **{column: value}) for value in sorted(table[column].unique())[::-1]
    }


def _forms(one: pd.DataFrame) -> Curves:
    found: Curves = {}
    for c in sorted(chosen(one, symmetrize=False).sigma_scale.unique())[::-1]:
        for form, safe in ((True, False), (True, True), (False, False), (False, True)):
            name = f"{' ' * safe}{'S' if form else 'D'}, c = {c:g}{_safe(safe)}"
            found[name] = chosen(one, sigma_scale=c, symmetrize=form, safeguard=safe)
    return {name: rows for name, rows in found.items() if len(rows)}


def _directions(ours: pd.DataFrame) -> Curves:
    c, found = ours[ours.num_directions > 1].sigma_scale.min(), {}
    for m in sorted(ours.num_directions.unique()):
        own = chosen(ours, symmetrize=True, delta_scale=0, num_directions=m)
        found[f"m = {m:g}"] = chosen(own, sigma_scale=1, safeguard=False)
        found[f" m = {m:g}, c = {c:g}, safeguard"] = chosen(own, sigma_scale=c, safeguard=True)
    return {name: rows for name, rows in found.items() if len(rows)}


def _methods(table: pd.DataFrame) -> Curves:
    plain = chosen(chosen(table, method=OURS, rule="given"), **_except("sigma_scale"))
    best, descent = best_variant(table), chosen(table, method="gradient descent")
    num_rates = descent.lr_factor.nunique()
    num_ours = len(chosen(table, method=OURS, num_directions=1)[SETTINGS].drop_duplicates())
    tuned = descent.sort_values("step").groupby("lr_factor").gap.last().idxmin()
    return {
        "lemma": chosen(plain, sigma_scale=1),
        f" {OURS}, best of {num_ours}:\n{variant_name(best).removeprefix('S, ')}": table.merge(
            best[SETTINGS].drop_duplicates(), on=SETTINGS
        ),
        " gradient descent, 1/λ": chosen(descent, lr_factor=1),
        f"  gradient descent, {tuned:g}/λ,\nbest of {num_rates}": chosen(descent, lr_factor=tuned),
        " Newton": chosen(table, method="Newton"),
        CUBIC: chosen(table, method="cubic Newton"),
    }


def _panel(ax: Axes, curves: Curves, x: str, y: str, title: str = "") -> None:
    """Draw medians over seeds, with the range between the seeds as a band; x on a log axis, 0 at its left end."""
    positive = min(own[x][own[x] > 0].min() for own in curves.values())
    styles = panels.styles_of(dict.fromkeys(name.strip().partition(", c =")[0] for name in curves))
    for name, own in curves.items():
        color = styles[name.strip().partition(", c =")[0]]["color"]
        values = own.groupby("step")[y]
        at = own.groupby("step")[x].median().clip(lower=positive / 2)
        shown = pd.DataFrame({"x": at, "y": values.median(), "low": values.min(), "high": values.max()})
        # A step that costs many products is paid before it is taken: no slanted line from one point to the next.
        look: dict[str, Any] = {"color": color, "marker": "", "linestyle": LINES[len(name) - len(name.lstrip())]}
        look |= {} if x == "step" else {"drawstyle": "steps-post"}
        ends: dict[str, Any] = {} if own.seed.nunique() == 1 else {"low": "low", "high": "high"}
        panels.lines(ax, shown, x="x", y="y", label=name.strip(), **ends, **look)
    if y == NORM:
        ax.set_ylim(FLOOR, 10)
    panels.frame(ax, x=AXES.get(x, x), y=y, title=title, log="xy" if y == NORM else "x")
