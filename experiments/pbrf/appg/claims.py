"""App. G, claims: the formulas as printed and as meant, CG and LiSSA at equal cost, seconds, the s_test trick."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Interval, exact
from curvlab.lab import judge as judged
from experiments.pbrf.appg.cost_claims import judge_costs
from experiments.pbrf.appg.summary import geometric
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
        *judge_costs(computed, claims),
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
