"""Theorem 1 and Corollary 1 against measured errors of LiSSA (Klochkov & Liu 2024, Sec. 3, App. B.1, B.2).

make lissa-thm1 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.1"

For problems whose Gauss-Newton matrix can be held (a trained network; the task of App. B.4 with finitely many
examples, where C of condition C.1 is 1), u_0 = 0 and η = 1 / (λmax + λ): E‖u_t - u*‖² over trials of `Lissa`, for
batches of 1 to 1,000, beside the theorem's bound with the best δ of condition (9) and beside (10) as printed; the
limit of the error, and the |B| at which it stops existing, from the exact second moments.

What is printed and does not hold: (10) lacks the factor δ⁻¹, about 1 / (2ηλ), of the theorem's second term: what
stands there is the variance of one update, but updates add up. B.1 concludes η² (E H_t² - H²) ⪯ η(H + λ) - δ from
(9), which gives 2η(H + λ) - η²(H + λ)² - δ only; with u_0 on the far side of u* the theorem's second bound then
fails (`one of 10` here; `Bounds.corrected` holds for every start). B.2 has C tr / |B| >= 1/η - λ for <=, and
λ(η + H) for η(λ + H); B.1 ends with (1 - δ)² for (1 - δ)^t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.influence import per_example_gradients
from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, exact, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.names import reader_names
from curvlab.problem import stack
from experiments.lissa.thm1 import factored_problems
from experiments.lissa.thm1.error_bounds import SecondMoments, bounds, condition_constant, mean_error, requirements
from experiments.lissa.trials import iterates_from
from experiments.shared import stats
from experiments.shared.task import Task
from experiments.shared.worst_case import judge_row, largest

TARGET = Target(
    __name__,
    title="Theorem 1 and (10) against measured errors",
    paper={
        "settings.csv:problem": "any",
        "batch_sizes": "any",
        "damping_ratio": "any",
        "damping_ratios": "any",
        "table.csv:num_trials": "expectation",
    },
    curves=("table: error over step by problem, damping_ratio, batch_size",),
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A problem, and what is done with it.

    Attributes:
        problem: with its dense matrices.
        seed_name: what its trials' random streams are named after.
        key: identifies the problem in the store.
        settings: `trials` of LiSSA, `exact_limits` (whether thresholds and limits of the error are computed),
            `exact_curves` (whether second moments are computed step by step).
    """

    problem: factored_problems.FactoredProblem
    seed_name: str
    key: Row
    settings: DictConfig

    def recipe(self, damping_ratio: float) -> tuple[float, float]:
        """Return the damping, and Corollary 1's step size."""
        damping = damping_ratio * self.problem.largest
        return damping, 1 / (self.problem.largest + damping)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return errors and bounds over steps (`table`) and in the limit (`stationary`), `settings`, and `start`.

    `settings`: the requirements on |B|, one row for each problem and damping; `importance`: those of batches drawn
    by importance. `start`: the far start. Errors are relative to ‖u*‖², but in `start`.

    Args:
        run: seeds and store.
        cfg: tasks and `signs`, each with `trials`, `exact_limits`, `exact_curves`; `damping_ratio` of `table` and
            `damping_ratios` of the limits, both over λmax; `batch_sizes`, `stationary_batch_sizes`,
            `num_time_constants`, `num_shown_steps`, `far_start`.
    """
    rows: dict[str, list[Row]] = {name: [] for name in ("table", "settings", "stationary", "importance")}
    for case in _cases(run, cfg):
        weights = factored_problems.ImportanceProblem(*vars(case.problem).values()).weights
        for ratio in cfg.damping_ratios:
            names = {"problem": case.problem.name, "damping_ratio": float(ratio)}
            key = case.key | {"damping_ratio": ratio, "exact_limits": case.settings.exact_limits}
            found = _limits(run, case, **key, batch_sizes=list(cfg.stationary_batch_sizes))
            rows["settings"].append(names | found["settings"])
            rows["stationary"] += [names | row for row in found["stationary"]]
            if float(weights.max() - weights.min()) >= 1e-9:  # or else importance sampling is uniform
                rows["importance"].append(names | _by_importance(run, case, **key))
        names = {"problem": case.problem.name, "damping_ratio": float(cfg.damping_ratio)}
        rows["table"] += [names | row for row in _errors(run, cfg, case)]
    run.note(seeds=[cfg.seed])
    tables = {name: pd.DataFrame(own) for name, own in rows.items()}
    return tables | {"start": pd.DataFrame(_from_afar(run, cfg.far_start))}


def _cases(run: Run, cfg: DictConfig) -> Iterator[Case]:
    for signs in cfg.signs:
        sizes = (signs.spectrum, signs.size, signs.num_examples)
        problem = factored_problems.signs_problem(*sizes, run.generator("signs", *sizes))
        yield Case(problem, problem.name, {"signs": list(sizes)}, signs)
    for loaded in Task.each(run, cfg):
        task = loaded.trained()
        model = task.model.cpu().double()  # dense matrices of few parameters
        inputs, targets = (each.cpu() for each in stack(task.train, torch.arange(task.num_train)))
        # g: the training example of median gradient norm, neither fitted nor an outlier
        gradients = per_example_gradients(model, task.loss, (inputs.double(), targets))
        middle = int(gradients.norm(dim=1).argsort()[task.num_train // 2])
        problem = factored_problems.network_problem(task.label, model, inputs.double(), gradients[middle])
        yield Case(problem, task.seed_name, {"task": task.key}, task.settings)


@unit("lissa/thm1_limits", version=1, about="limits, damping ratio {damping_ratio:g}")
def _limits(
    run: Run, case: Case, /, *, damping_ratio: float, batch_sizes: list[int], exact_limits: bool, **_: Any
) -> dict[str, Any]:
    damping, step_size = case.recipe(damping_ratio)
    return requirements(
        case.problem, damping, step_size=step_size, batch_sizes=batch_sizes, exact_limits=exact_limits
    )


@unit("lissa/thm1_importance", version=1, about="importance sampling, damping ratio {damping_ratio:g}")
def _by_importance(run: Run, case: Case, /, *, damping_ratio: float, exact_limits: bool, **_: Any) -> Row:
    """Return C of uniform batches; by importance C, the |B| below which it diverges, and tr / λmax."""
    problem = case.problem
    damping, step_size = case.recipe(damping_ratio)
    weighted = factored_problems.ImportanceProblem(problem.name, problem.factors, problem.gradient)
    moments = SecondMoments(weighted, damping, step_size=step_size)
    return {
        "constant_uniform": condition_constant(problem),
        "constant": condition_constant(weighted),
        "exact": moments.exact_threshold() if exact_limits else math.nan,
        "corollary": problem.trace / problem.largest,
    }


def _errors(run: Run, cfg: DictConfig, case: Case) -> list[Row]:
    """Return measured errors and bounds, relative to ‖u*‖², over steps, for every batch size."""
    damping, step_size = case.recipe(cfg.damping_ratio)
    last = math.ceil(cfg.num_time_constants / (step_size * damping))
    shown = sorted({int(step) for step in np.geomspace(1, last, cfg.num_shown_steps).round()})
    # What "≲" hides in (10) according to its proof: 3 from Theorem 1 at u_0 = 0, and C.
    constants = {"first_constant": 3.0, "second_constant": max(1.0, condition_constant(case.problem))}
    key = case.key | {"damping_ratio": cfg.damping_ratio, "shown": shown}
    key |= {"trials": case.settings.trials, "exact_curves": case.settings.exact_curves}
    rows: list[Row] = []
    for batch_size in run.progress(list(cfg.batch_sizes), f"LiSSA on {case.problem.name}"):
        stored = _trials(run, case, **key, batch_size=batch_size)
        own = bounds(case.problem, damping, step_size=step_size, batch_size=batch_size)
        scale, root = own.solution_norm, math.sqrt(case.settings.trials)
        for index, step in enumerate(shown):
            square, projection = stored["squares"][index] / scale, stored["projections"][index] / scale
            rows.append(
                {
                    "batch_size": batch_size,
                    "step": step,
                    "error": float(square.mean()),
                    "error_stderr": float(square.std()) / root,
                    "exact": float(stored["exact"][step]) / scale if stored["exact"] is not None else math.nan,
                    "theorem": own.theorem(step) / scale,
                    "corrected": own.corrected(step) / scale,
                    "printed": own.printed(step) / scale,
                    "printed_generous": own.printed(step, **constants) / scale,
                    "mean": float(projection.mean()),
                    "mean_stderr": float(projection.std()) / root,
                    "mean_norm": mean_error(case.problem, damping, step_size=step_size, step=step),
                    "mean_bound": own.contraction**step,
                    "delta": own.delta,
                    "num_trials": case.settings.trials,
                }
            )
    return rows


@unit("lissa/thm1_errors", version=1, about="errors, |B| = {batch_size}")
def _trials(
    run: Run,
    case: Case,
    /,
    *,
    damping_ratio: float,
    batch_size: int,
    shown: list[int],
    trials: int,
    exact_curves: bool,
    **_: Any,
) -> dict[str, Any]:
    damping, step_size = case.recipe(damping_ratio)
    errors = factored_problems.lissa_errors(
        case.problem,
        trials,
        damping=damping,
        step_size=step_size,
        batch_size=batch_size,
        shown=shown,
        generator=run.generator("thm1", case.seed_name, batch_size),
    )
    moments = SecondMoments(case.problem, damping, step_size=step_size)
    return {
        "squares": errors.square().sum(1),
        "projections": -(errors * case.problem.solution(damping)[:, None]).sum(1),  # on u_0 - u*
        "exact": moments.errors(batch_size, shown[-1]) if exact_curves else None,
    }


def _from_afar(run: Run, part: DictConfig) -> list[Row]:
    """Return measured and exact errors, and bounds, in the one-dimensional case that starts beyond u*."""
    problem = factored_problems.rare_problem(part.num_examples)
    stored = _far_trials(run, problem, **{str(name): value for name, value in part.items()})
    own = bounds(problem, part.damping, step_size=part.step_size, batch_size=1)
    first = float(stored["exact"][0])
    return [
        {
            "problem": problem.name,
            "step": step,
            "error": float(stored["measured"][step]),
            "error_stderr": float(stored["stderr"][step]),
            "exact": float(stored["exact"][step]),
            "theorem": own.theorem(step, start_error=first),
            "corrected": own.corrected(step, start_error=first),
            "delta": own.delta,
            "num_trials": part.trials,
        }
        for step in range(part.num_steps + 1)
    ]


@unit("lissa/thm1_far_start", version=1, about="errors from a far start")
def _far_trials(
    run: Run,
    problem: factored_problems.FactoredProblem,
    /,
    *,
    damping: float,
    step_size: float,
    start: float,
    num_steps: int,
    trials: int,
    **_: Any,
) -> dict[str, Any]:
    first = torch.tensor([start], dtype=torch.float64)
    iterates = iterates_from(
        factored_problems.TrialOperator(problem, trials),
        problem.gradient,
        first,
        damping=damping,
        step_size=step_size,
        batch_size=1,
        num_steps=num_steps,
        generator=run.generator("far start"),
    )
    solution = problem.solution(damping)[:, None]
    measured = torch.stack([(u - solution).square().sum(0) for u in iterates])
    return {
        "measured": measured.mean(1),
        "stderr": measured.std(1) / math.sqrt(trials),
        "exact": SecondMoments(problem, damping, step_size=step_size).errors(1, num_steps, start=first),
    }


# ------------------------------------------------------------------------------------ judge
SETTING = ["problem", "damping_ratio"]


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge what is measured by trials or is a slope, each where it fares worst; the rest says its value."""
    errors, settings, stationary = computed["table"], computed["settings"], computed["stationary"]
    covered, admitted = covered_and_admitted(errors, settings)
    limits = stationary[np.isfinite(stationary.error)]
    return [
        _measured(
            claims.claim("second-moment-bound"),
            covered,
            "theorem",
            "From u_0 = 0 the cross term of the proof is negative where H and E H_t² commute; here they do not.",
        ),
        _any_start(claims.claim("second-moment-bound-any-start"), computed["start"]),
        _measured(
            claims.claim("printed-bound"),
            admitted,
            "printed_generous",
            "(10) lacks δ⁻¹, about 1 / (2ηλ): its second term is the variance of one update, and the limit adds "
            "up many. On the trained network the slack of its other steps is larger than that factor here; with "
            "one example's gradient in the task of B.4, where C.1 is nearly tight, it is not.",
        ),
        _uniform(claims.claim("printed-bound-uniform"), limits),
        _scaling(claims.claim("batch-scaling"), limits.merge(settings[[*SETTING, "exact"]], on=SETTING)),
    ]


def covered_and_admitted(errors: pd.DataFrame, settings: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows where (9) holds, as Theorem 1 asks, and of these the ones of Corollary 1's batches."""
    covered = errors[errors.delta > 0]
    return covered, covered.merge(settings[[*SETTING, "corollary"]], on=SETTING).query("batch_size >= corollary")


def _measured(claim: Claim, table: pd.DataFrame, bound: str, why: str) -> ClaimResult:
    """Judge the largest upper end of the measured error over its bound."""
    if table.empty:
        return out_of_reach(claim, "No batch size of this preset is admitted.")
    values, stderrs = table.error / table[bound], table.error_stderr / table[bound]
    place = largest(values + 1.96 * stderrs)
    row = table.iloc[place]
    kind = f"{row.problem}, |B| = {row.batch_size}, t = {row.step}"
    return judge_row(claim, table, values, place, kind, why, stderrs=stderrs)


def _any_start(claim: Claim, start: pd.DataFrame) -> ClaimResult:
    ratios = start.exact / start.theorem
    place = largest(ratios)
    why = (
        f"At t = {start.step.iloc[place]} the exact error is {ratios.iloc[place]:.3f} times the bound. B.1 takes "
        "η² (E H_t² - H²) <= η(H + λ) - δ for granted, which (9) does not give, so the cross term is larger than "
        "it says. 2 (1 - δ)^t ‖u_0 - u*‖² + 2 δ⁻¹ η² Δ holds for every start (here at most "
        f"{float((start.exact / start.corrected).max()):.2f} of it): two terms, no cross term."
    )
    return judge_row(claim, start, ratios, place, f"t = {start.step.iloc[place]}", why)


def _uniform(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    slopes = {}
    for problem, own in limits[limits.batch_size == 100].groupby("problem", sort=False):
        ends = own.iloc[[largest(-own.inverse_delta), largest(own.inverse_delta)]]
        slopes[problem] = stats.log_log_slope(ends.inverse_delta, ends.error / ends.printed)
    slopes = {problem: slope for problem, slope in slopes.items() if not math.isnan(slope)}
    if not slopes:
        return out_of_reach(claim, "No problem has limits at |B| = 100 for two dampings.")
    value = max(slopes.values())
    shown = ", ".join(f"{problem} {slope:.2f}" for problem, slope in slopes.items())
    why = f"Slopes: {shown}; δ⁻¹, which Theorem 1 has and (10) drops, would give up to 1."
    interval = exact(value, kind=f"exact, largest of {len(slopes)} problems")
    return judge_claim(claim, value, interval, if_not_reproduced=why)


def _scaling(claim: Claim, limits: pd.DataFrame) -> ClaimResult:
    far = limits[limits.batch_size >= 2 * limits.exact].groupby(SETTING)
    slopes = [stats.log_log_slope(own.batch_size, own.error) for _, own in far if len(own) > 1]
    if not slopes:
        return out_of_reach(claim, "Too few batch sizes above the threshold.")
    value = max(slopes, key=lambda slope: abs(slope + 1))
    why = "Close to the threshold the error is larger than its leading order in 1 / |B|."
    interval = exact(value, kind=f"exact, farthest of {len(slopes)} settings")
    return judge_claim(claim, value, interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
BOUNDS = {"theorem": "Theorem 1's bound", "printed_generous": "the printed bound (10)"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the error over both bounds; and from the far start, and in the limit over dampings."""
    errors = computed["table"].replace({"problem": _readers(computed["table"].problem)})
    settings = computed["settings"].replace({"problem": _readers(computed["settings"].problem)})
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 3.4), sharey=True)
    for ax, (bound, name), own in zip(
        axes[0], BOUNDS.items(), covered_and_admitted(errors, settings), strict=True
    ):
        worst = own.assign(ratio=own.error / own[bound]).groupby(["problem", "batch_size"], sort=False)
        panels.lines(ax, worst.ratio.max().reset_index(), x="batch_size", y="ratio", by="problem")
        panels.rule(ax, y=1, label="the paper: at most 1", color="black")
        panels.frame(ax, x="batch size |B|", title=f"measured error over {name}", log="xy")
    axes[0, 0].set_ylabel("largest over steps")
    trials = errors.num_trials.agg(["min", "max"]).map("{:.0f}".format)
    note = f"mean over {' to '.join(trials)} trials of LiSSA; B.4's task: that of App. B.4, with such a spectrum"
    panels.legend(figure, columns=3, title=note)
    stationary = computed["stationary"]
    more = _far_and_damping(computed["start"], stationary.replace({"problem": _readers(stationary.problem)}))
    return {"figure.png": figure, "figure_more.png": more}


def _readers(problems: pd.Series) -> dict[str, str]:
    """Return readers' names of the networks, and of the task of App. B.4 by its spectrum."""
    built = {name: "B.4's task, " + name.split(", ")[1] for name in problems if name.startswith("signs")}
    return reader_names(problems.unique(), whole=True) | built


def _far_start(ax: Axes, start: pd.DataFrame) -> None:
    ax.plot(start.step, start.exact, color="black", linewidth=1, label="computed exactly")
    some = start[start.step % max(len(start) // 12, 1) == 0]
    plots.measured(ax, some.step, some.error, some.error_stderr, color="black", label="measured (95 %)")
    bounds = {"theorem": "Theorem 1, best δ", "corrected": "corrected"}
    for (column, label), look in zip(bounds.items(), panels.styles_of(bounds.values()).values(), strict=True):
        ax.plot(start.step, start[column], color=look["color"], linestyle="--", label=label)
    title = "u_0 = 4 u*: Theorem 1 does not hold\n(one example in ten has curvature)"
    panels.frame(ax, x="step t", y="E (u_t - u*)²", title=title, log="y")
    ax.legend()


def _far_and_damping(start: pd.DataFrame, stationary: pd.DataFrame) -> Figure:
    """The error from a far start; and its limit over the second term of (10), against 1 / (2ηλ)."""
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 3.6))
    _far_start(axes[0, 0], start)
    ax = axes[0, 1]
    own = stationary[(stationary.batch_size == 100) & stationary.error.notna()]
    panels.lines(ax, own.assign(ratio=own.error / own.printed), x="inverse_delta", y="ratio", by="problem")
    panels.rule(ax, y=1, label="(10) as printed")
    ends = [stationary.inverse_delta.min(), stationary.inverse_delta.max()]
    ax.plot(ends, ends, color=panels.GREY, linestyle=":", linewidth=1, label="the dropped factor 1 / (2ηλ)")
    panels.frame(ax, x="1 / (2ηλ)", y="limit of the error /\nsecond term of (10), |B| = 100", log="xy")
    panels.legend(figure, columns=3, axes=[ax])
    return figure
