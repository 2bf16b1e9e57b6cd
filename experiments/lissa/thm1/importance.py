"""Condition C.1 for examples drawn by importance: what Theorem 1 needs, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from curvlab.lab import runs
from experiments.lissa.thm1.bounds import SecondMoments, condition_constant
from experiments.lissa.thm1.problems import FactoredProblem

COLUMNS = ("problem", "damping_ratio", "constant_uniform", "constant", "exact", "corollary")


@dataclass(frozen=True)
class ImportanceProblem(FactoredProblem):
    """The same G, of which example i is drawn with q_i = tr(G_i) / Σ tr, and weighted by 1 / (N q_i)."""

    @cached_property
    def weights(self) -> Tensor:
        """1 / (N q_i), (N,); 0 where G_i is 0, which is never drawn."""
        traces = self.factors.square().sum((1, 2))
        return (traces.mean() / traces).where(traces > 0, 0.0)

    def gap(self, matrix: Tensor) -> Tensor:
        """Return E (H̃ - G) M (H̃ - G) for one draw H̃ = G_i / (N q_i): 1/N Σ G_i M G_i / (N q_i) - G M G."""
        size, _, rank = self.factors.shape
        product = (matrix @ self.flat).unflatten(1, (size, rank)).transpose(0, 1)
        inner = self.weights[:, None, None] * (self.factors.mT @ product)
        outer = (self.factors @ inner).transpose(0, 1).flatten(1)
        return outer @ self.flat.T / size - self.dense @ matrix @ self.dense


def importance_rows(
    run: runs.Run,
    problem: FactoredProblem,
    key: dict[str, Any],
    damping_ratios: list[float],
    *,
    exact_limits: bool,
) -> list[dict[str, Any]]:
    """Return one row for each damping: C, and the |B| below which the second moment diverges.

    Columns constant_uniform, of uniform batches; constant and exact, by importance; corollary, tr / λmax. No rows
    where all examples have one trace: importance sampling is uniform there.

    Args:
        run: store.
        problem: G.
        key: identifies the problem in the store.
        damping_ratios: damping / λmax.
        exact_limits: whether the threshold is computed; nan otherwise.
    """
    weights = ImportanceProblem(problem.name, problem.factors, problem.gradient).weights
    if float(weights.max() - weights.min()) < 1e-9:
        return []
    rows = []
    for ratio in damping_ratios:
        unit = key | {"damping_ratio": ratio, "exact_limits": exact_limits}
        about = f"importance sampling of {problem.name}, damping ratio {ratio:g}"
        measure = partial(_row, problem, ratio, exact_limits=exact_limits)
        found = run.unit("lissa/thm1_importance", unit, measure, version=1, about=about)
        rows.append({"problem": problem.name, "damping_ratio": float(ratio)} | found)
    return rows


def _row(problem: FactoredProblem, damping_ratio: float, *, exact_limits: bool) -> dict[str, float]:
    weighted = ImportanceProblem(problem.name, problem.factors, problem.gradient)
    damping = damping_ratio * problem.largest
    moments = SecondMoments(weighted, damping, step_size=1 / (problem.largest + damping))
    return {
        "constant_uniform": condition_constant(problem),
        "constant": condition_constant(weighted),
        "exact": moments.exact_threshold() if exact_limits else math.nan,
        "corollary": problem.trace / problem.largest,
    }
