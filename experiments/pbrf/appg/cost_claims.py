"""App. G, claims on cost: truncated CG, LiSSA's work over CG's to the same goal, and what repeats are worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, out_of_reach, t_interval, task_settings
from curvlab.lab import judge as judged
from curvlab.lab.claims.intervals import MIN_SAMPLES
from experiments.pbrf.appg.summary import ERROR, cost_to, geometric
from experiments.pbrf.gaps import explained

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


def judge_costs(computed: Computed, claims: ClaimSheet) -> Iterator[ClaimResult]:
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
