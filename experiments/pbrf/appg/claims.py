"""App. G, claims: the formulas as printed and as meant, CG and LiSSA at equal cost, seconds, the s_test trick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from curvlab.lab import (
    Claim,
    ClaimResult,
    ClaimSheet,
    Computed,
    Interval,
    exact,
    out_of_reach,
    t_interval,
    task_settings,
)
from curvlab.lab import judge as judged
from curvlab.lab.claims.intervals import MIN_SAMPLES
from experiments.pbrf.appg.summary import ERROR, cost_to, geometric
from experiments.pbrf.gaps import explained
from experiments.shared.stats import log_log_slope
from experiments.shared.worst_case import judge_row, largest, smallest

NOT_HERE = "No task of this run measures it."
NOTHING = pd.DataFrame()  # in the place of a table that no task has


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the formulas once, and the rest for every task; intervals are over seeds."""
    results = [
        *_formulas(claims, computed.get("formulas", NOTHING), computed["table"]),
        *_definite(claims, computed["states"]),
        *_costs(computed, claims),
        *_steps(claims, computed.get("step_time", NOTHING)),
        *_s_test(claims, computed.get("s_test", NOTHING)),
    ]
    for name in claims.entries:
        if not any(result.claim.id == name or result.claim.id.startswith(f"{name}-") for result in results):
            of_none = {"matrix": "no matrix"} if "{matrix}" in claims.entries[name]["statement"] else {}
            results.append(claims.unjudged(name, NOT_HERE, **of_none))
    return results


def _formulas(claims: ClaimSheet, table: pd.DataFrame, solved: pd.DataFrame) -> Iterator[ClaimResult]:
    if table.empty:
        return
    deep = table[table.num_terms.isin([np.inf, table[table.formula == "from 0"].num_terms.max()])]
    whys = {
        "series-becomes-exact": "Rounding, or too few terms.",
        "printed-start": "Without the term t = 0 the limit is (H + λ)⁻¹v - v/σ: for v the top eigenvector and σ "
        "its eigenvalue with the damping, every term from t = 1 on is zero, and the truth is v/σ.",
        "products-of-batches": "Rounding.",
        "printed-powers": "Powers of one batch's matrix sum to the mean over batches of (H_B + λ)⁻¹v, not to the "
        "inverse of the mean; more repeats and more terms do not change that, larger batches lessen it.",
    }
    formulas = ("from 0", "from 1", "products", "powers of one batch")
    for (name, why), formula in zip(whys.items(), formulas, strict=True):
        own = deep[deep.formula == formula]
        worst = smallest(own.error) if name == "printed-powers" else largest(own.error)
        yield judge_row(claims.claim(name), own, own.error, worst, str(own.case.iloc[worst]), why)
    yield _depth(claims, table[table.formula == "depth"], solved)


def _depth(claims: ClaimSheet, depth: pd.DataFrame, solved: pd.DataFrame) -> ClaimResult:
    """Judge what is left at curvature zero, beside what LiSSA leaves of gradients at that depth and damping."""
    best = smallest(depth.error)
    first = depth.iloc[best]
    scale = float(str(first.case).removeprefix("σ = "))
    left = {
        share: share ** (1 / first.num_terms) for share in (first.error, 0.1)
    }  # of 1 - (h + λ)/σ, for one step
    damping, shallow = scale * (1 - left[first.error]), scale * (left[first.error] - left[0.1])
    why = (
        f"T λ/σ is {first.num_terms * damping / scale:.2g} at best, and {depth.error.max():.2f} is left with "
        f"{depth.case.iloc[largest(depth.error)]}. Gradients of squared error and cross-entropy lie in the "
        "range of G, and so have no component of curvature zero; but of a component of "
        f"curvature h, (1 - (h + λ)/σ)^T is left, more than a tenth up to h = {shallow:.2g} (σ = {scale:g}), and "
        "what they have below that decides."
    )
    same = solved[solved.method.str.startswith("LiSSA, 1 ") & (solved.num_steps == first.num_terms)]
    same = same[np.isclose(same.damping, damping, rtol=1e-3)]
    if not same.empty:
        found = [f"{row.task} {row.error:.2g} ({row.correlation:.2g})" for row in same.itertuples()]
        why += f" LiSSA's error with this depth and damping (and correlation of scores): {', '.join(found)}."
    return judge_row(claims.claim("depth-suffices"), depth, depth.error, best, str(first.case), why)


def _definite(claims: ClaimSheet, states: pd.DataFrame) -> Iterator[ClaimResult]:
    for task, own in states[states.curvature == "hessian"].groupby("task", sort=False):
        values = own["smallest eigenvalue"] + own["damping asked for"]
        value, kind = float(values.min()), f"deterministic, least of {len(own)} seeds"
        why = (
            f"The smallest eigenvalue is {own['smallest eigenvalue'].min():.2g} to "
            f"{own['smallest eigenvalue'].max():.2g}: along such directions CG breaks down and LiSSA's series "
            f"diverges. Here the Hessian has damping {own.damping.min():.2g} to {own.damping.max():.2g}."
        )
        claim = claims.claim("hessian-positive-definite", of=str(task))
        yield judged(claim, value, exact(value, kind=kind), if_not_reproduced=why)


def _steps(claims: ClaimSheet, table: pd.DataFrame) -> Iterator[ClaimResult]:
    if table.empty:
        return
    for (task, step), own in table.groupby(["task", "step"], sort=False):
        by_size = own.groupby("N")[["operations", "milliseconds"]].mean()
        slope = round(float(log_log_slope(by_size.index, by_size.operations)), 9) + 0.0  # what is left is rounding
        slopes = np.array([log_log_slope(rows.N, rows.milliseconds) for _, rows in own.groupby("repeat")])
        listed = ", ".join(f"{size}: {1e-6 * ops:.3g} ({ms:.3g})" for size, (ops, ms) in by_size.iterrows())
        why = (
            f"Millions of operations (milliseconds) by N: {listed}. The slope of milliseconds is "
            f"{slopes.mean():.2g} ({slopes.min():.2g} to {slopes.max():.2g} in {len(slopes)} repeats)."
        )
        name = "step-independent-of-n" if step == "LiSSA" else "product-linear-in-n"
        counted = exact(slope, kind="deterministic: counted")
        yield explained(judged(claims.claim(name, of=str(task)), slope, counted, if_not_reproduced=why), why)


def _s_test(claims: ClaimSheet, table: pd.DataFrame) -> Iterator[ClaimResult]:
    if table.empty:
        return
    for task, own in table.groupby("task", sort=False):
        apart = float(own["largest relative difference"].max())
        kind = f"deterministic, largest of {len(own)}"
        why = "The solver's tolerance leaves more than that: lower s_test.rtol."
        claim = claims.claim("s-test-equal", of=str(task))
        yield judged(claim, apart, exact(apart, kind=kind), if_not_reproduced=why)
        claim = claims.claim("s-test-saves", of=str(task))
        value, interval = _saved(own, "products")
        seconds, spread = _saved(own, "seconds")
        why = f"Of seconds the ratio is {seconds:.2g} ({spread.low:.2g} to {spread.high:.2g})."
        yield explained(judged(claim, value, interval, if_not_reproduced=why), why)


def _saved(own: pd.DataFrame, cost: str) -> tuple[float, Interval]:
    """Return the cost by training points over that by s_test, over N / N_test: geometric means."""
    ratio = own[f"{cost} by training points"] / own[f"{cost} by s_test"]
    saved = own.assign(logs=np.log(ratio * own.N_test / own.N))
    return geometric(np.exp(saved.groupby("seed").logs.mean().to_numpy()))


# ------------------------------------------------------------------------------------ cost
STABLE = 2.0  # (λmax + λ) / σ, from which on the terms of Eq. 48 grow
PAPER_DAMPING = 0.001
MATRICES = {"gauss_newton": "Gauss-Newton matrix", "hessian": "Hessian"}

Curves = dict[int, pd.DataFrame]  # by seed


@dataclass(frozen=True)
class Repeated:
    """What LiSSA did on the systems of one task and matrix, beside CG.

    Attributes:
        cg: curves of CG.
        lissa: curves by method: of one run, and of the mean of all.
        unstable: (λmax + λ) / σ of the seeds where it is above `STABLE`: their σ is no scaling of Eq. 48.
        seconds: a sentence on measured seconds, or "".
    """

    cg: Curves
    lissa: dict[str, Curves]
    unstable: dict[int, float]
    seconds: str

    @property
    def seeds(self) -> list[int]:
        """Those in which a scaling was found."""
        return [seed for seed in self.cg if all(seed in curves for curves in self.lissa.values())]

    @property
    def stable_seeds(self) -> list[int]:
        """Those whose numbers are LiSSA's."""
        return [seed for seed in self.seeds if seed not in self.unstable]


def _costs(computed: Computed, claims: ClaimSheet) -> Iterator[ClaimResult]:
    """Judge CG and, where it ran, LiSSA, for every task and matrix."""
    states = computed["states"]
    for (task, curvature), own in computed["curves"].groupby(["task", "curvature"], sort=False):
        of = str(task) if curvature == "gauss_newton" else f"{task}-hessian"
        state = states[(states.task == task) & (states.curvature == curvature)].set_index("seed")
        by_method: dict[str, Curves] = {
            str(method): {int(str(seed)): curve for seed, curve in rows.groupby("seed")}
            for method, rows in own.groupby("method", sort=False)
        }
        if "CG" not in by_method:  # what all the others are judged beside
            continue
        matrix = {"matrix": _matrix(str(curvature), state.damping)}
        yield _truncated(claims.claim("truncated-cg", of=of, **matrix), by_method["CG"], state)
        lissa = {method: curves for method, curves in by_method.items() if method.startswith("LiSSA")}
        if len(lissa) < 2:
            continue
        repeated = Repeated(by_method["CG"], lissa, _unstable(state), _seconds_of_a_batch(computed, str(task)))
        for name, quantity in (("cheaper-scores", "correlation"), ("cheaper-solution", "error")):
            yield _cheaper(claims.claim(name, of=of, **matrix), repeated, quantity)
        yield _repeats(claims.claim("repeats-help", of=of, **matrix), repeated)


def _matrix(curvature: str, damping: pd.Series) -> str:
    """Return the name of a matrix with its damping, which a Hessian has from its least eigenvalue in each seed."""
    ends = list(dict.fromkeys(f"{value:.2g}" for value in (damping.min(), damping.max())))
    return f"{MATRICES[curvature]} with damping {' to '.join(ends)}"


def guaranteed_steps(condition: np.ndarray, error: float) -> np.ndarray:
    """Return the steps after which CG's relative error is at most `error` for any right-hand side.

    From 0, in exact arithmetic, ‖x_k - x‖ ≤ 2 √κ ((√κ - 1) / (√κ + 1))^k ‖x‖, in the norm of the errors here
    (Saad 2003, Iterative Methods for Sparse Linear Systems, Sec. 6.11.3, in the norm of the matrix: hence √κ in
    front); k = ½ √κ ln(2 √κ / error) is enough.
    """
    root = np.sqrt(condition)
    return np.asarray(0.5 * root * np.log(2 * root / error))


def lower_bounds(ratios: np.ndarray, num_short: int) -> tuple[float, Interval]:
    """Return the geometric mean of ratios, `num_short` of which are lower bounds, and from where on it may lie.

    No t interval: bounds scatter by where the runs were cut. The interval goes from the least of them up without
    end, so that only what all of them exclude is excluded; with fewer than three seeds it has no ends.
    """
    value, kind = float(np.exp(np.log(ratios).mean())), f"lower bounds in {num_short} of {len(ratios)} seeds"
    if len(ratios) < MIN_SAMPLES:
        return value, Interval(np.nan, np.nan, f"{kind}, too few of them", len(ratios))
    return value, Interval(float(ratios.min()), np.inf, f"{kind}, from the least ratio on", len(ratios))


def _truncated(claim: Claim, curves: Curves, state: pd.DataFrame) -> ClaimResult:
    state = state.loc[list(curves)]
    worst = [cost_to(curve.assign(error=curve.error_worst), "error") for curve in curves.values()]
    condition, share = _guaranteed(state, state.damping)
    taken = np.array(worst) / state.P.to_numpy()
    why = (
        f"At its end the error is {np.median([curve.error_worst.iloc[-1] for curve in curves.values()]):.2g}. "
        f"It falls to {ERROR} within {taken.max():.2g} d; the condition number, {condition.max():.0f} at most, "
        f"guarantees {share.max():.2g} d."
    )
    damping = float(state.damping.mean())
    if (state["smallest eigenvalue"] >= 0).all() and damping > 2 * PAPER_DAMPING:
        condition, share = _guaranteed(state, PAPER_DAMPING)
        why += (
            f" With the paper's damping, {PAPER_DAMPING}, it would be {condition.max():.0f}, and the guarantee "
            f"{share.max():.2g} d."
        )
    of_enough = taken / np.minimum(share, 1)
    return explained(judged(claim, float(of_enough.mean()), t_interval(of_enough), if_not_reproduced=why), why)


def _guaranteed(state: pd.DataFrame, damping: pd.Series | float) -> tuple[np.ndarray, np.ndarray]:
    """Return condition numbers, and the steps that they guarantee over d."""
    condition = ((state["largest eigenvalue"] + damping) / (state["smallest eigenvalue"] + damping)).to_numpy()
    return condition, guaranteed_steps(condition, ERROR) / state.P.to_numpy()


def _unstable(state: pd.DataFrame) -> dict[int, float]:
    if "LiSSA scale" not in state:
        return {}
    reach = (state["largest eigenvalue"] + state.damping) / state["LiSSA scale"]
    return {int(str(seed)): float(value) for seed, value in reach[reach > STABLE].items()}


def _seconds_of_a_batch(computed: Computed, task: str) -> str:
    """Return what a step of a batch takes beside what it counts for, where both were measured."""
    settings = {name.replace("_", "-"): own for name, own in task_settings(computed.config).items()}
    if "step_time" not in computed or task not in settings:
        return ""
    table = computed["step_time"]
    own = table[table.task == task]
    if own.empty:
        return ""
    size = settings[task].step_time.batch_size
    products, batches = own[own.step == "CG"], own[own.step == "LiSSA"]
    taken = float(batches.milliseconds.mean())
    counted = size * float((products.milliseconds / products.N).mean())
    sizes = f"{own.N.min():,} to {own.N.max():,}"
    return (
        f" The cost is no time: a step of {size} examples takes {taken:.2g} ms, where |B| / N of a product "
        f"counts for {counted:.2g} ms (N = {sizes}); in time LiSSA costs {taken / counted:.2g} "
        "times as much there."
    )


def _cheaper(claim: Claim, repeated: Repeated, quantity: str) -> ClaimResult:
    """Judge LiSSA's work over CG's, seed by seed."""
    ratios: dict[int, float] = {}
    short: list[int] = []
    for seed in repeated.seeds:
        curves = [by_seed[seed] for by_seed in repeated.lissa.values()]
        reached = [cost for curve in curves if np.isfinite(cost := cost_to(curve, quantity))]
        if not reached:
            short.append(seed)
        # Where none gets there, each needs more than all of its work: the cheapest of them is a bound for all.
        work = min(reached) if reached else min(curve.work.max() for curve in curves)
        ratios[seed] = work / cost_to(repeated.cg[seed], quantity)
    texts = {seed: f"{'at least ' * (seed in short)}{ratio:.2g}" for seed, ratio in ratios.items()}
    stable = repeated.stable_seeds
    ends = {
        method: np.mean([curves[seed][quantity].iloc[-1] for seed in stable])
        for method, curves in repeated.lissa.items()
        if stable
    }
    why = f"Seed by seed: {', '.join(texts[seed] for seed in stable)}. " if stable else ""
    why += f"{quantity.capitalize()} at the end: " + ", ".join(f"{m} {v:.2g}" for m, v in ends.items()) + "."
    why += _left_out(repeated, texts) + repeated.seconds
    if not stable:
        return out_of_reach(claim, f"No seed has a stable series.{_left_out(repeated, texts)}")
    chosen, num_short = np.array([ratios[seed] for seed in stable]), len(set(short) & set(stable))
    ratio, interval = lower_bounds(chosen, num_short) if num_short else geometric(chosen)
    return explained(judged(claim, ratio, interval, if_not_reproduced=why), why)


def _repeats(claim: Claim, repeated: Repeated) -> ClaimResult:
    """Judge the error of the mean over that of the first run, at their ends."""
    first, mean = (
        {seed: float(curves[seed].error.iloc[-1]) for seed in repeated.seeds} for curves in repeated.lissa.values()
    )
    texts = {seed: f"{first[seed]:.2g} and {mean[seed]:.2g}" for seed in repeated.seeds}
    stable = repeated.stable_seeds
    if not stable:
        return out_of_reach(claim, f"No seed has a stable series.{_left_out(repeated, texts)}")
    ratios = np.array([mean[seed] / first[seed] for seed in stable])
    alike = [seed for seed in stable if mean[seed] / first[seed] > (claim.criterion.at_most or 1.0)]
    why = f"Errors of one run and of the mean, seed by seed: {', '.join(texts[seed] for seed in stable)}. "
    missing = (
        "what is left is less noise than the part of the series that is missing at this depth, in every repeat"
    )
    if len(alike) == len(stable):
        why += f"{missing[0].upper()}{missing[1:]}."
    elif alike:
        why += f"In {_named(alike)} {missing}; elsewhere it is noise that the mean lessens."
    else:
        why += "It is noise that the mean lessens."
    why += _left_out(repeated, texts)
    ratio, interval = geometric(ratios)
    return explained(judged(claim, ratio, interval, if_not_reproduced=why), why)


def _left_out(repeated: Repeated, texts: dict[int, str]) -> str:
    """Return what was found where the series is unstable."""
    return "".join(
        f" Left out, since unstable in seed {seed}: {texts[seed]}; there (λmax + λ) / σ = {reach:.4g} (λmax "
        f"from below, to 1 %), above {STABLE:.0f}: σ is too small for the series, although no repeat grew "
        "enough within its steps to be seen diverging."
        for seed, reach in repeated.unstable.items()
        if seed in texts
    )


def _named(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
