"""Fig. 4, claims: what App. B.3 reads off it, and what Sec. 3 assumes of C."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, out_of_reach, reporting
from experiments.lissa.fig4.slopes import slopes
from experiments.shared.worst_case import largest

SLOPE_WHY = "with independent examples -1 is an identity, (E G_i² - G²) / |B|; more realizations will tell."
TRACE_WHY = (
    "Single examples carry much more curvature than the mean: E r⁴ of the paper's derivation (B.3), which C "
    "stands for, is not near 1 for a network that has fitted most examples."
)
TOKENS_WHY = "The tokens of a sequence share directions, so a batch of sequences is worth fewer tokens."


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task."""
    fitted = slopes(computed["table"]).set_index("task")
    results = [_slope(claims.claim("slope"), fitted)]
    measured = computed["constants"].set_index("task").to_dict("index")
    for task, found in fitted.iterrows():
        name = str(task)
        results += [
            _with_error(claims.claim("trace", of=name), found.constant, found.constant_stderr, TRACE_WHY),
            _directions(claims.claim("directions", of=name), measured[name], found.constant),
        ]
        if not math.isnan(found.coherence):
            claim = claims.claim("incoherence", of=name)
            results.append(_with_error(claim, found.coherence, found.coherence_stderr, TOKENS_WHY))
    if fitted.coherence.isna().all():
        results.append(
            out_of_reach(claims.claim("incoherence", of="language-models"), "No language model in this run.")
        )
    return results


def _slope(claim: Claim, fitted: pd.DataFrame) -> ClaimResult:
    """Judge the identity on all tasks by the one whose 95 % reach the farthest from -1."""
    place = largest((fitted.slope + 1).abs() + 1.96 * fitted.slope_stderr)
    found = fitted.iloc[place]
    return _with_error(claim, found.slope, found.slope_stderr, f"It is {fitted.index[place]}: {SLOPE_WHY}")


def _directions(claim: Claim, found: dict[Any, Any], in_the_trace: float) -> ClaimResult:
    low, high = float(found["at_least"]), float(found["at_most"])
    hidden = ", which the traces average away" if in_the_trace <= found["assumed"] else ""
    why = (
        f"From batches C is {in_the_trace:.2g} in the trace, {found['random']:.2g} in random directions, "
        f"{found['leading']:.2g} in the worst leading eigenvector, {found['example']:.2g} where a single example "
        f"points; from all examples at least {low:.2g} and at most {high:.2g}; the training loss is "
        f"{found['train_loss']:.2g}. Once most examples are fitted, few carry the curvature{hidden}: a network "
        "stopped early keeps the condition (mlp-64-64-digits-early, embedded). What follows for LiSSA with C = 2 "
        "and with C measured: lissa-fig1."
    )
    interval = Interval(low, high, "from the directions tried to what is enough", 1)
    return reporting.judge(claim, low, interval, if_not_reproduced=why)


def _with_error(claim: Claim, value: float, stderr: float, why: str) -> ClaimResult:
    interval = Interval(value - 1.96 * stderr, value + 1.96 * stderr, "95 % over realizations", 1)
    return reporting.judge(claim, value, interval, if_not_reproduced=why)
