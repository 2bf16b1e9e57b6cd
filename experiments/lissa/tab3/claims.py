"""Table 3, claims: what App. C says of sketches, and whether the printed numbers can belong to one matrix."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, Interval, bootstrap_interval
from experiments.lissa.printed import judge_printed
from experiments.target import Computed


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
            _sketch(sketch, row, dense),
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


def _sketch(claim: Claim, row: pd.Series, dense: pd.DataFrame) -> ClaimResult:
    value, half = row.dense_value / row.lambda_max, 1.96 * row.dense_stderr / row.lambda_max
    interval = Interval(value - half, value + half, "95 % over Φ, to first order", 1)
    push = row.frobenius_full / (row.dense_rows**0.5 * row.lambda_max)
    why = (
        f"Its standard error alone is √(2/d) = {(2 / row.dense_rows) ** 0.5:.2g}; neighbours push it up by "
        f"up to ‖G‖_F / (√d lambda_max) = {push:.2g}."
    )
    if len(dense):
        relative = dense.value / dense.lambda_max - 1
        why += (
            f" {len(dense)} sketches with d = {dense.rows.iloc[0]}: bias {relative.mean():+.2g}, spread "
            f"{relative.std():.2g}."
        )
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


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
