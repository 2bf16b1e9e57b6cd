"""Table 3, claims: what App. C says of sketches, and whether the printed numbers can belong to one matrix."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import (
    Claim,
    ClaimResult,
    ClaimSheet,
    Computed,
    Interval,
    bootstrap_interval,
    out_of_reach,
    reporting,
)
from curvlab.lab.reporting.intervals import MIN_SAMPLES
from experiments.lissa.printed import judge_printed

ENOUGH_ROWS = 200  # of a dense sketch: even that of a matrix of rank one has a standard error of √(2/d), here 0.1
FORMS = {"dense": "dense", "per tensor": "per_tensor"}  # of a sketch, and the prefix of its columns in the table
PRINTED_RATIOS = {False: "3.2e3 and 8.9e3 (vision)", True: "5.4, 14 and 20 (language)"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims about the printed rows, and for each model those about sketches."""
    table, paper = computed["table"].set_index("task"), computed["paper"].set_index("row")
    sketches, gradients = computed["sketches"], computed["gradients"]
    possible = (paper.norm_over_trace <= 1) & (paper.square_over_product <= 1)
    broken = ", ".join(paper.index[~possible])
    why = (
        f"Impossible for one matrix: {broken}. The two numbers cannot refer to the same parameters and examples. "
        f"Ours, with one set of both for each row: at most {table.norm_over_trace.max():.2g} and "
        f"{table.square_over_product.max():.2g} (summary.csv)."
    )
    results = [
        judge_printed(claims.claim("printed-norm-below-trace"), paper.norm_over_trace, why=why),
        judge_printed(claims.claim("printed-square-below-product"), paper.square_over_product, why=why),
        judge_printed(
            claims.claim("rows-suffice"),
            paper.error_over_lambda_max[possible],
            why=f"Without {broken}, whose norms are impossible.",
        ),
    ]
    for task, row in table.iterrows():
        of, own, num_tensors = str(task), gradients[gradients.task == task], int(row.tensors)
        repeated = {form: sketches[(sketches.task == task) & (sketches.form == form)] for form in FORMS}
        sketch = claims.claim("sketch", of=of, rows=int(row.dense_rows))
        variance = claims.claim("variance", of=of, tensors=num_tensors)
        equivalent = claims.claim("equivalent-rows", of=of, tensors=num_tensors)
        results += [
            _sketch(sketch, row, repeated["dense"]),
            _concatenated(claims, row, repeated),
            _two_batches(claims.claim("two-batches", of=of, pairs=int(row.pairs)), row),
            _squared_ratio(
                claims.claim("squared-ratio", of=of, printed=PRINTED_RATIOS[row.unit == "tokens"]), row
            ),
            _ratio(variance, own.per_tensor, own.dense, _masses(own)),
            _ratio(equivalent, own.dense / num_tensors, own.per_tensor, _masses(own)),
            _ratio(
                claims.claim("dot-products", of=of),
                own.cosine_squared,
                pd.Series(1.0, own.index),
                "These gradients are aligned.",
            ),
        ]
    return results


def _sketch(claim: Claim, row: pd.Series, repeated: pd.DataFrame) -> ClaimResult:
    """Judge λmax by one dense sketch; `repeated`: others."""
    rows = int(row.dense_rows)
    value, error = row.dense_value / row.lambda_max, row.dense_stderr / row.lambda_max
    if rows < ENOUGH_ROWS:
        return out_of_reach(
            claim,
            f"{rows} rows are too few: √(2/d) = {(2 / rows) ** 0.5:.2g} is the error of a dense sketch at rank "
            f"one; {ENOUGH_ROWS} would do. These gave {row.dense_value:.3g} ± {row.dense_stderr:.2g}, Lanczos "
            f"{row.lambda_max:.4g}.",
        )
    interval = Interval(value - 1.96 * error, value + 1.96 * error, "95 % over Φ, to first order", 1)
    push = row.frobenius_full / (rows**0.5 * row.lambda_max)
    why = (
        f"Its standard error alone is {error:.2g}; neighbours push it up by up to ‖G‖_F / (√d lambda_max) = "
        f"{push:.2g}."
    )
    if len(repeated):
        relative = repeated.value / repeated.lambda_max - 1
        why += (
            f" {len(repeated)} sketches with d = {repeated.rows.iloc[0]}: bias {relative.mean():+.2g}, spread "
            f"{relative.std():.2g}."
        )
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


def _concatenated(claims: ClaimSheet, row: pd.Series, repeated: dict[str, pd.DataFrame]) -> ClaimResult:
    """Judge the error of concatenated sketches over that of dense ones, at equal rows.

    Repeated: the ratio of mean squares of n and m sketches, by quantiles of F(n, m). One of each: what is farther
    off than 1.96 of its standard errors is off, and a dense one is off by its standard error at least.
    """
    why = (
        "To first order the squared error of D rows is 2/D of a dense sketch and 2 L/D Σ ‖v_l‖⁴ of a concatenated "
        "one, v_l the part of the eigenvector in tensor l: never less, and L times as much where one tensor holds "
        f"it all. The table's single sketches: dense {row.dense_value:.3g} ± {row.dense_stderr:.2g} "
        f"({row.dense_rows:.0f} rows), concatenated {row.per_tensor_value:.3g} ± {row.per_tensor_stderr:.2g} "
        f"({row.per_tensor_rows:.0f} rows, {row.per_tensor_rows / row.tensors:.0f} for each tensor; a bias of "
        f"{row.per_tensor_bias:.3g} is taken off), Lanczos {row.lambda_max:.4g}."
    )
    of, numbers = str(row.name), {form: len(own) for form, own in repeated.items()}
    if min(numbers.values()) >= MIN_SAMPLES:
        squares = {
            form: float(((own.value / own.lambda_max - 1) ** 2 * own.rows).mean())
            for form, own in repeated.items()
        }
        value = (squares["per tensor"] / squares["dense"]) ** 0.5
        chance = [float(stats.f.ppf(q, numbers["per tensor"], numbers["dense"])) ** 0.5 for q in (0.975, 0.025)]
        kind = f"F 95 %, {numbers['per tensor']} and {numbers['dense']} sketches"
        interval = Interval(value / chance[0], value / chance[1], kind, min(numbers.values()))
        rows = int(repeated["dense"].rows.iloc[0])
        return reporting.judge(
            claims.claim("concatenated", of=of, rows=rows), value, interval, if_not_reproduced=why
        )
    off, error = {}, {}
    for form, prefix in FORMS.items():
        scale = row[f"{prefix}_rows"] ** 0.5 / row.lambda_max
        off[form] = abs(row[f"{prefix}_value"] - row.lambda_max) * scale
        error[form] = row[f"{prefix}_stderr"] * scale
    dense, concatenated = off["dense"], off["per tensor"]
    low = max(0.0, concatenated - 1.96 * error["per tensor"]) / (dense + 1.96 * error["dense"])
    high = (concatenated + 1.96 * error["per tensor"]) / error["dense"]
    value = math.hypot(concatenated, error["per tensor"]) / math.hypot(dense, error["dense"])
    claim = claims.claim("concatenated", of=of, rows=int(row.per_tensor_rows))
    return reporting.judge(claim, value, Interval(low, high, "95 %, a sketch of each", 1), if_not_reproduced=why)


def _two_batches(claim: Claim, row: pd.Series) -> ClaimResult:
    ratio = row.frobenius / row.frobenius_full
    relative = (
        (row.frobenius_stderr / row.frobenius) ** 2 + (row.frobenius_full_stderr / row.frobenius_full) ** 2
    ) ** 0.5
    interval = Interval(ratio * (1 - 1.96 * relative), ratio * (1 + 1.96 * relative), "95 % of both errors", 1)
    why = (
        f"{row.frobenius:.3g} ± {row.frobenius_stderr:.2g} against {row.frobenius_full:.4g} ± "
        f"{row.frobenius_full_stderr:.2g}. Its square is unbiased, but where few examples carry the "
        f"curvature it is heavy-tailed: {int(row.pairs)} pairs of {int(row.examples_per_batch)} examples "
        "mostly miss them, and the standard error with them."
    )
    return reporting.judge(claim, float(ratio), interval, if_not_reproduced=why)


def _squared_ratio(claim: Claim, row: pd.Series) -> ClaimResult:
    limit = f"tr / lambda_max = {row.trace / row.lambda_max:.3g}"
    if row.unit != "tokens":
        return out_of_reach(
            claim,
            f"No positive semi-definite matrix of this trace and lambda_max exceeds {limit}: a network this small "
            f"cannot have thousands; it has {row.squared_ratio:.2g}. The printed rows cannot either, by their own "
            "trace (printed-square-below-product).",
        )
    value, half = row.squared_ratio, 2 * 1.96 * row.frobenius_full_stderr / row.frobenius_full * row.squared_ratio
    interval = Interval(value - half, value + half, "95 % of ‖G‖_F, to first order", 1)
    why = f"It lies between 1 and {limit} for any such matrix."
    return reporting.judge(claim, float(value), interval, if_not_reproduced=why)


def _masses(own: pd.DataFrame) -> str:
    tensors = (own.dense_exact / own.per_tensor_exact).median()
    return (
        f"The squared norms are not spread evenly: they amount to {tensors:.1f} equal tensors (exact variances, "
        "median over pairs). And it saves random numbers only: the concatenated sketch takes L d products with G."
    )


def _ratio(claim: Claim, numerator: pd.Series, denominator: pd.Series, why: str) -> ClaimResult:
    """Judge the ratio of means over pairs with its bootstrap interval."""
    columns = numerator.to_numpy(), denominator.to_numpy()

    def statistic(above: np.ndarray, below: np.ndarray) -> float:
        return float(above.mean() / below.mean())

    interval = bootstrap_interval(columns, statistic, unit="pairs", generator=np.random.default_rng(0))
    return reporting.judge(claim, statistic(*columns), interval, if_not_reproduced=why)
