"""Table 1, claims: what Sec. 3 says about the numbers, and what the printed rows say about each other."""

from __future__ import annotations

import math

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, exact, out_of_reach, reporting
from experiments.lissa.printed import judge_printed
from experiments.shared.worst_case import farthest_ratio, largest

BOUNDS = (
    "The lower bound is that of the directions tried, the upper one max_i λmax(G_i), both from all examples one "
    "by one; between them the condition is not decided."
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims from our table and the paper's."""
    table, paper = computed["table"].set_index("task"), computed["paper"].set_index("row")
    implied = table.assumed_constant * table.trace / table.lambda_max
    stderr = table.assumed_constant * table.trace_stderr / table.lambda_max
    relative = table.trace_per_parameter_stderr / table.trace_per_parameter * (table.forms / 1600) ** 0.5
    needed = ", ".join(
        f"{task} {row.needed_at_least:.3g} to {row.needed_at_most:.3g}" for task, row in table.iterrows()
    )
    constants = ", ".join(
        f"{task} {row.constant_at_least:.2g} to {row.constant_at_most:.2g}" for task, row in table.iterrows()
    )
    return [
        _largest(claims.claim("trace-error"), relative, f"The most uneven examples: {relative.idxmax()}."),
        _unbiased(claims.claim("trace-unbiased"), table),
        _between(
            claims.claim("batch-above-one"),
            float(table.needed_at_least.min()),
            float(table.needed_at_most.min()),
            f"By model: {needed}. {BOUNDS}",
        ),
        _one_sequence(claims.claim("one-sequence"), table, implied, stderr),
        _extreme(claims.claim("requirement-mild"), implied, stderr, str(implied.idxmax())),
        _between(
            claims.claim("requirement-mild-measured"),
            float(table.needed_at_least.max()),
            float(table.needed_at_most.max()),
            f"By model: {needed}. {BOUNDS}",
        ),
        _between(
            claims.claim("constant-two"),
            float(table.constant_at_least.max()),
            float(table.constant_at_most.max()),
            f"By model: {constants}. {BOUNDS} The condition is sufficient: that C = 2 breaks it does not say that "
            "LiSSA diverges. Whether it converges is measured in lissa-fig1 (recipe-converges) and lissa-fig2.",
        ),
        judge_printed(
            claims.claim("printed-batch"),
            paper.batch_size / (2 * paper.trace / paper.lambda_max),
            smallest=True,
            why="2 tr / lambda_max of that row is 87, not 5; fig1's claim `overflow` is about this model.",
        ),
        _printed_steps(claims.claim("printed-steps"), paper),
        judge_printed(
            claims.claim("printed-step"),
            paper.step_size * (paper.lambda_max + 5.0),
            why="Rounded up from 0.00018; it still keeps 2 / lambda_max, below which the mean converges.",
        ),
    ]


def _printed_steps(claim: Claim, paper: pd.DataFrame) -> ClaimResult:
    ratios = paper.num_steps * paper.step_size * paper.damping / 2
    name = str(paper.index[farthest_ratio(ratios)])
    listed = ", ".join(f"{row} {ratio:.3g}" for row, ratio in ratios.items())
    return reporting.judge(
        claim,
        float(ratios[name]),
        exact(float(ratios[name]), kind=f"{name}, printed"),
        if_not_reproduced=f"By row: {listed}. More steps than the formula's do no harm.",
    )


def _largest(claim: Claim, values: pd.Series, why: str) -> ClaimResult:
    value = float(values.max())
    return reporting.judge(
        claim, value, exact(value, kind=f"largest of {len(values)} models"), if_not_reproduced=why
    )


def _between(claim: Claim, low: float, high: float, why: str) -> ClaimResult:
    """Judge a lower bound, with the interval from it to the upper bound (infinite where there is none)."""
    interval = Interval(low, high, "from the directions tried to what is enough", 1)
    return reporting.judge(claim, low, interval, if_not_reproduced=why)


def _unbiased(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge forms over the trace, exact where it is to be had, by the model whose 95 % reach farthest from 1."""
    known = table.exact_trace.notna()
    full = (table.exact_trace / table.parameters).where(known, table.full_trace_per_parameter)
    error = table.full_trace_per_parameter_stderr.where(~known, 0.0)
    ratio = table.trace_per_parameter / full
    forms = table.trace_per_parameter_stderr / table.trace_per_parameter
    half = 1.96 * ratio * (forms**2 + (error / full) ** 2) ** 0.5
    worst = largest((ratio - 1).abs() + half)
    value, wide, task = float(ratio.iloc[worst]), float(half.iloc[worst]), str(table.index[worst])
    return reporting.judge(
        claim,
        value,
        Interval(value - wide, value + wide, f"95 % of both errors, {task}", 1),
        if_not_reproduced=f"It is {task} whose interval reaches the farthest from 1: more forms will tell.",
    )


def _extreme(claim: Claim, values: pd.Series, errors: pd.Series, task: str, why: str = "") -> ClaimResult:
    value, half = float(values[task]), 1.96 * float(errors[task])
    interval = Interval(value - half, value + half, f"95 % of the trace, {task}", len(values))
    if not math.isfinite(half):
        interval = exact(value, kind=f"{task}, one probe")
    return reporting.judge(claim, value, interval, if_not_reproduced=why or f"It is {task} that has this value.")


def _one_sequence(claim: Claim, table: pd.DataFrame, implied: pd.Series, stderr: pd.Series) -> ClaimResult:
    language = table.unit == "tokens"
    if not language.any():
        return out_of_reach(claim, "No language model among the tasks of this run.")
    task = str(implied[language].idxmax())
    row = table.loc[task]
    why = (
        f"{row.batch_size} tokens are recommended for {task}, {row.batch_size_measured} with twice the C measured "
        f"({row.constant:.2g}); our sequences have {row.per_example:.0f}."
    )
    return _extreme(claim, implied, stderr, task, why)
