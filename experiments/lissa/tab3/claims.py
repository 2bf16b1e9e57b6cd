"""Table 3, claims: what App. C says of sketches, and whether the printed numbers can belong to one matrix."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, Interval, bootstrap_interval, out_of_reach
from experiments.lissa.printed import judge_printed
from experiments.target import Computed

ENOUGH_ROWS = 200  # of a sketch: even that of a matrix of rank one has a standard error of √(2/d), here 0.1
# What Table 3 prints, and bounds around it: vision 3.22e3 and 8.92e3, language 5.43, 14.2, 19.8.
PRINTED_RATIOS = {
    False: {"printed": "3.2e3 and 8.9e3 (vision)", "low": 1000, "high": 30000},
    True: {"printed": "5.4, 14 and 20 (language)", "low": 2, "high": 60},
}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims about the printed rows, and for each model those about sketches."""
    table, paper = computed["table"].set_index("task"), computed["paper"].set_index("row")
    sketches, gradients = computed["sketches"], computed["gradients"]
    broken = ", ".join(paper.index[(paper.norm_over_trace > 1) | (paper.square_over_product > 1)])
    why = (
        f"Impossible for one matrix: {broken}. The code froze different parameters for the two numbers. Ours, "
        f"with one set of parameters a row: at most {table.norm_over_trace.max():.2g} and "
        f"{table.square_over_product.max():.2g} (summary.csv)."
    )
    results = [
        judge_printed(claims.claim("printed-norm-below-trace"), paper.norm_over_trace, why=why),
        judge_printed(claims.claim("printed-square-below-product"), paper.square_over_product, why=why),
        judge_printed(
            claims.claim("rows-suffice"),
            paper.error_over_lambda_max,
            why="By the printed numbers the bound on the error exceeds lambda_max itself; with the norm of a "
            "possible matrix, ‖G‖_F² <= lambda_max tr(G), it is at most √(tr / (5000 lambda_max)), 0.15 and less.",
        ),
    ]
    for task, row in table.iterrows():
        of, own, num_tensors = str(task), gradients[gradients.task == task], int(row.tensors)
        dense = sketches[(sketches.task == task) & (sketches.form == "dense")]
        sketch = claims.claim("sketch", of=of, rows=int(row.dense_rows))
        variance = claims.claim("variance", of=of, tensors=num_tensors)
        equivalent = claims.claim("equivalent-rows", of=of, tensors=num_tensors)
        results += [
            _sketch(sketch, row, dense, "dense"),
            _sketch(
                claims.claim("concatenated", of=of, rows=int(row.per_tensor_rows)),
                row,
                sketches[(sketches.task == task) & (sketches.form == "per tensor")],
                "per_tensor",
            ),
            _two_batches(claims.claim("two-batches", of=of, pairs=int(row.pairs)), row),
            _squared_ratio(claims.claim("squared-ratio", of=of, **PRINTED_RATIOS[row.unit == "tokens"]), row),
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


def _sketch(claim: Claim, row: pd.Series, repeated: pd.DataFrame, form: str) -> ClaimResult:
    """Judge λmax by one sketch, `form` "dense" or "per_tensor"; `repeated`: others of that form."""
    rows = int(row[f"{form}_rows"])
    value, half = row[f"{form}_value"] / row.lambda_max, 1.96 * row[f"{form}_stderr"] / row.lambda_max
    if rows < ENOUGH_ROWS:
        return out_of_reach(
            claim,
            f"{rows} rows are too few: √(2/d) = {(2 / rows) ** 0.5:.2g} is their error at rank one; {ENOUGH_ROWS} "
            f"would do. These gave {row[f'{form}_value']:.3g} ± {row[f'{form}_stderr']:.2g}, Lanczos "
            f"{row.lambda_max:.4g}.",
        )
    interval = Interval(value - half, value + half, "95 % over Φ, to first order", 1)
    push = row.frobenius_full / (rows**0.5 * row.lambda_max)
    why = (
        f"Its standard error alone is √(2/d) = {(2 / rows) ** 0.5:.2g}; neighbours push it up by up to "
        f"‖G‖_F / (√d lambda_max) = {push:.2g}."
    )
    if form == "per_tensor":
        each = rows // int(row.tensors)
        why += (
            f" Concatenated, every tensor has {each} rows of its own: within a tensor the error is that of {each}."
        )
    if len(repeated):
        relative = repeated.value / repeated.lambda_max - 1
        why += (
            f" {len(repeated)} sketches with d = {repeated.rows.iloc[0]}: bias {relative.mean():+.2g}, spread "
            f"{relative.std():.2g}."
        )
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


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
    value, half = row.squared_ratio, 2 * 1.96 * row.frobenius_full_stderr / row.frobenius_full * row.squared_ratio
    interval = Interval(value - half, value + half, "95 % of ‖G‖_F, to first order", 1)
    why = (
        f"No positive semi-definite matrix exceeds tr / lambda_max, here {row.trace / row.lambda_max:.3g}; the "
        "printed rows of both ResNets do (printed-square-below-product)."
    )
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
