"""Table 3, claims: what App. C says of sketches, and whether the printed numbers can belong to one matrix."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, bootstrap_interval, exact, judge

APPENDIX = "Klochkov & Liu 2024, App. C"

NORM_TRACE = Claim(
    id="printed-norm-below-trace",
    statement="The numbers of Tables 1 and 3 belong to one positive semi-definite matrix a model: ‖G‖_F <= tr(G).",
    source="Klochkov & Liu 2024, Tables 1 and 3",
    paper_value="at most 1 for any such matrix",
    measure="printed ‖G‖_F over printed tr(G)/P times P, largest of five rows",
    criterion=Criterion(at_most=1.0),
)
SQUARE_PRODUCT = Claim(
    id="printed-square-below-product",
    statement="The same for ‖G‖_F² <= lambda_max tr(G).",
    source="Klochkov & Liu 2024, Tables 1 and 3",
    paper_value="at most 1 for any such matrix",
    measure="printed ‖G‖_F² over printed lambda_max tr(G), largest of five rows",
    criterion=Criterion(at_most=1.0),
)
ENOUGH_ROWS = Claim(
    id="rows-suffice",
    statement="d = 5000 rows suffice for the models of Table 3, the sketch's error being of the order ‖G‖_F / √d.",
    source=f"{APPENDIX}; Sec. 3: the error is negligible for the top eigenvalue",
    paper_value="negligible",
    measure="printed ‖G‖_F / (√5000 lambda_max), largest of five rows",
    criterion=Criterion(at_most=0.1, direction_at_most=0.5),
)


def judge_claims(
    table: pd.DataFrame, sketches: pd.DataFrame, gradients: pd.DataFrame, paper: pd.DataFrame
) -> list[ClaimResult]:
    """Judge the claims about the printed rows, and for each model those about sketches."""
    broken = ", ".join(paper["row"][(paper.norm_over_trace > 1) | (paper.square_over_product > 1)])
    why = (
        f"Impossible for one matrix: {broken}. The code froze different parameters for the two numbers. Ours, "
        f"with one set of parameters a row: at most {table.norm_over_trace.max():.2g} and "
        f"{table.square_over_product.max():.2g} (summary.csv)."
    )
    results = [
        _printed(NORM_TRACE, paper, "norm_over_trace", why),
        _printed(SQUARE_PRODUCT, paper, "square_over_product", why),
        _printed(
            ENOUGH_ROWS,
            paper,
            "error_over_lambda_max",
            "By the printed numbers the bound on the error exceeds lambda_max itself; with the norm of a "
            "possible matrix, ‖G‖_F² <= lambda_max tr(G), it is at most √(tr / (5000 lambda_max)), 0.15 and less.",
        ),
    ]
    for row in table.to_dict("records"):
        own = gradients[gradients.task == row["task"]]
        results += [
            _sketch(row, sketches[sketches.task == row["task"]]),
            _variance(str(row["task"]), int(row["tensors"]), own),
            _equivalent(str(row["task"]), int(row["tensors"]), own),
            _orthogonal(str(row["task"]), own),
        ]
    return results


def _printed(claim: Claim, paper: pd.DataFrame, column: str, why: str) -> ClaimResult:
    where = int(paper[column].to_numpy().argmax())
    value, name = float(paper[column].iloc[where]), paper["row"].iloc[where]
    return judge(claim, value, exact(value, kind=f"{name}, printed"), if_not_reproduced=f"{name}: {why}")


def _sketch(row: dict[Hashable, Any], sketches: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"sketch-{row['task']}",
        statement=f"The sketch's top eigenvalue less tr/d is the matrix's, up to a small error ({row['task']}).",
        source="Klochkov & Liu 2024, Sec. 3, App. C",
        paper_value="error negligible with d = 5000",
        measure=f"lambda_max by a dense sketch (d = {row['dense_rows']}) over that by Lanczos",
        criterion=Criterion(at_least=0.85, at_most=1.15, direction_at_least=0.5, direction_at_most=1.5),
    )
    value, half = row["dense_value"] / row["lambda_max"], 1.96 * row["dense_stderr"] / row["lambda_max"]
    interval = Interval(value - half, value + half, "95 % over Φ, to first order", 1)
    push = row["frobenius_full"] / (row["dense_rows"] ** 0.5 * row["lambda_max"])
    why = (
        f"Its standard error alone is √(2/d) = {(2 / row['dense_rows']) ** 0.5:.2g}; neighbours push it up by "
        f"up to ‖G‖_F / (√d lambda_max) = {push:.2g}."
    )
    dense = sketches[sketches.form == "dense"]
    if len(dense):
        relative = dense.value / dense.lambda_max - 1
        why += (
            f" {len(dense)} sketches with d = {dense.rows.iloc[0]}: bias {relative.mean():+.2g}, spread "
            f"{relative.std():.2g}."
        )
    return judge(claim, value, interval, if_not_reproduced=why)


def _variance(task: str, num_tensors: int, own: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"variance-{task}",
        statement=f"Concatenating sketches by tensor dramatically reduces a dot product's variance ({task}).",
        source=APPENDIX,
        paper_value=f"up to 1/L; here L = {num_tensors}",
        measure="variance of the sketched dot product of two training gradients, per tensor over dense, equal d; "
        "ratio of means over pairs",
        criterion=Criterion(at_most=0.5, direction_at_most=0.99),
    )
    value, interval = _ratio(own.per_tensor, own.dense)
    return judge(claim, value, interval, if_not_reproduced=_masses(own))


def _equivalent(task: str, num_tensors: int, own: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"equivalent-rows-{task}",
        statement="Concatenation is worth L times the rows, the gradient's squared norm being spread over the "
        f"tensors ({task}).",
        source=APPENDIX,
        paper_value=1.0,
        measure=f"variance, dense over per tensor, over L = {num_tensors}",
        criterion=Criterion(at_least=0.5, direction_at_least=0.2),
    )
    value, interval = _ratio(own.dense / num_tensors, own.per_tensor)
    return judge(claim, value, interval, if_not_reproduced=_masses(own))


def _masses(own: pd.DataFrame) -> str:
    tensors = (own.dense_exact / own.per_tensor_exact).median()
    return (
        f"The squared norms are not spread evenly: they amount to {tensors:.1f} equal tensors (exact variances, "
        "median over pairs). And it saves random numbers only: the concatenated sketch takes L d products with G."
    )


def _orthogonal(task: str, own: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"dot-products-{task}",
        statement=f"<θ, θ'>² is significantly smaller than ‖θ‖²‖θ'‖², so the bounds may leave it out ({task}).",
        source=APPENDIX,
        paper_value="in practice significantly smaller",
        measure="squared cosine of two training gradients, mean over pairs",
        criterion=Criterion(at_most=0.1, direction_at_most=0.5),
    )
    values = own.cosine_squared.to_numpy()
    interval = bootstrap_interval(
        values, lambda v: float(np.mean(v)), unit="pairs", generator=np.random.default_rng(0)
    )
    return judge(claim, float(values.mean()), interval, if_not_reproduced="These gradients are aligned.")


def _ratio(numerator: pd.Series, denominator: pd.Series) -> tuple[float, Interval]:
    """Return the ratio of means over pairs with its bootstrap interval."""
    columns = numerator.to_numpy(), denominator.to_numpy()

    def statistic(above: np.ndarray, below: np.ndarray) -> float:
        return float(above.mean() / below.mean())

    interval = bootstrap_interval(columns, statistic, unit="pairs", generator=np.random.default_rng(0))
    return statistic(*columns), interval
