"""App. G, claims: the formulas as printed and as meant, CG and LiSSA at equal cost, seconds, the s_test trick."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, exact, out_of_reach, t_interval
from curvlab.reporting import judge as judged
from experiments.pbrf.appg.summary import cost_to, geometric
from experiments.shared.worst_case import judge_row, largest, smallest
from experiments.target import Computed

NOT_HERE = "No task of this run measures it."
NOTHING = pd.DataFrame()  # in the place of a table that no task has


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the formulas once, and the rest for every task; intervals are over seeds, or repeats of a timing."""
    results = [
        *_formulas(claims, computed.get("formulas", NOTHING)),
        *_definite(claims, computed["states"]),
        *_costs(claims, computed),
        *_seconds(claims, computed.get("step_time", NOTHING)),
        *_s_test(claims, computed.get("s_test", NOTHING)),
    ]
    for name in claims.entries:
        if not any(result.claim.id == name or result.claim.id.startswith(f"{name}-") for result in results):
            results.append(out_of_reach(claims.claim(name), NOT_HERE))
    return results


def _formulas(claims: ClaimSheet, table: pd.DataFrame) -> Iterator[ClaimResult]:
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
    depth = table[table.formula == "depth"]
    best = smallest(depth.error)
    why = (
        f"T λ/σ is 0.5 at best, and {depth.error.max():.2f} is left with σ = 500. Where the curvature is far "
        "below λ the answer lacks that share; outputs, and so the solver gap of Table 5, hardly see it there."
    )
    yield judge_row(claims.claim("depth-suffices"), depth, depth.error, best, str(depth.case.iloc[best]), why)


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


def _costs(claims: ClaimSheet, computed: Computed) -> Iterator[ClaimResult]:
    sizes = computed["states"].groupby("task").P.first()
    for (task, curvature), own in computed["curves"].groupby(["task", "curvature"], sort=False):
        of = str(task) if curvature == "gauss_newton" else f"{task}-hessian"
        by_method = {
            str(method): [curve for _, curve in rows.groupby("seed")]
            for method, rows in own.groupby("method", sort=False)
        }
        steps = np.array([cost_to(curve, "error") for curve in by_method["CG"]]) / float(sizes.loc[str(task)])
        why = f"At its end the error is {own[own.method == 'CG'].groupby('seed').error.last().median():.2g}."
        yield judged(
            claims.claim("truncated-cg", of=of), float(steps.mean()), t_interval(steps), if_not_reproduced=why
        )
        repeated = [method for method in by_method if method.startswith("LiSSA")]
        if len(repeated) < 2:
            continue
        for name, quantity in (("cheaper-scores", "correlation"), ("cheaper-solution", "error")):
            yield _cheaper(claims.claim(name, of=of), by_method, repeated, quantity)
        first, mean = (np.array([rows.error.iloc[-1] for rows in by_method[method]]) for method in repeated)
        ratio, interval = geometric(mean / first)
        why = (
            f"Errors {first.mean():.2f} of one run and {mean.mean():.2f} of the mean: what is left is less noise "
            "than the part of the series that is missing at this depth, the same in every repeat."
        )
        yield judged(claims.claim("repeats-help", of=of), ratio, interval, if_not_reproduced=why)


def _cheaper(
    claim: Claim, by_method: dict[str, list[pd.DataFrame]], repeated: list[str], quantity: str
) -> ClaimResult:
    """Judge LiSSA's work over CG's, seed by seed."""
    ratios, short = [], 0
    for index, cg in enumerate(by_method["CG"]):
        curves = [by_method[method][index] for method in repeated]
        reached = [cost for curve in curves if np.isfinite(cost := cost_to(curve, quantity))]
        short += not reached
        work = min(reached) if reached else max(curve.work.max() for curve in curves)
        ratios.append(work / cost_to(cg, quantity))
    ratio, interval = geometric(np.array(ratios))
    ends = {method: np.mean([rows[quantity].iloc[-1] for rows in by_method[method]]) for method in repeated}
    why = (
        f"It does not get there in {short} of {len(ratios)} seeds, so that this is a lower bound. "
        if short
        else "It gets there in every seed. "
    )
    why += f"{quantity.capitalize()} at the end: " + ", ".join(f"{m} {v:.2g}" for m, v in ends.items()) + "."
    return judged(claim, ratio, interval, if_not_reproduced=why)


def _seconds(claims: ClaimSheet, table: pd.DataFrame) -> Iterator[ClaimResult]:
    if table.empty:
        return
    for (task, step), own in table.groupby(["task", "step"], sort=False):
        slopes = np.array([_slope(rows.N, rows.milliseconds) for _, rows in own.groupby("repeat")])
        means = own.groupby("N").milliseconds.mean()
        why = "Milliseconds by N: " + ", ".join(f"{size}: {value:.3g}" for size, value in means.items()) + "."
        name = "step-independent-of-n" if step == "LiSSA" else "product-linear-in-n"
        claim = claims.claim(name, of=str(task))
        yield judged(claim, float(slopes.mean()), t_interval(slopes, unit="repeats"), if_not_reproduced=why)


def _s_test(claims: ClaimSheet, table: pd.DataFrame) -> Iterator[ClaimResult]:
    if table.empty:
        return
    for task, own in table.groupby("task", sort=False):
        apart = float(own["largest relative difference"].max())
        kind = f"deterministic, largest of {len(own)}"
        why = "The solver's tolerance leaves more than that: lower s_test.rtol."
        claim = claims.claim("s-test-equal", of=str(task))
        yield judged(claim, apart, exact(apart, kind=kind), if_not_reproduced=why)
        saved = own.assign(
            ratio=own["seconds by training points"] / own["seconds by s_test"], sizes=own.N / own.N_test
        )
        slopes = np.array([_slope(rows.sizes, rows.ratio) for _, rows in saved.groupby("seed")])
        means = saved.groupby("N_test").ratio.mean()
        why = "Ratio of seconds by N_test: " + ", ".join(f"{n}: {value:.2g}" for n, value in means.items()) + "."
        claim = claims.claim("s-test-saves", of=str(task))
        yield judged(claim, float(slopes.mean()), t_interval(slopes), if_not_reproduced=why)


def _slope(x: pd.Series, y: pd.Series) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
