"""LiSSA's settings for batches that are drawn by importance: C of condition C.1 is at most 1 by construction."""

from __future__ import annotations

import dataclasses

import torch

from curvlab.curvature import ImportanceOperator, example_importance
from curvlab.linalg import LinearOperator
from curvlab.solvers.hyperparameters import lissa_hyperparameters
from curvlab.solvers.recipe import LissaRecipe, check_undamped, measure_recipe
from curvlab.spectrum import Estimate, top_eigenvalues


def measure_importance_recipe(
    operator: LinearOperator,
    damping: float,
    *,
    safety: float = 2.0,
    num_time_constants: float = 4.0,
    generator: torch.Generator | None = None,
) -> LissaRecipe:
    """Measure λmax and all tr(G_i) of G (without damping) and return |B| = safety · C tr / λmax, and the rest.

    Examples are drawn by `example_importance`: C is at most 1.01, no direction is tried, and tr is exact. Then
    |B| >= C tr / λmax is enough, and safety = 2, the paper's own C, halves the sampling noise. Where traces are
    estimated, C is measured (`measure_recipe`).

    Args:
        operator: GaussNewtonOperator of the whole data, also spread over processes, or a DenseOperator of N
            matrices.
        damping: added to G before inversion.
        safety: factor before C.
        num_time_constants: T in units of 1 / (step size damping).
        generator: of probes and estimated traces.

    Cost: some products for λmax, and (1 + C) / 5 products for the traces of C outputs.
    """
    check_undamped(operator, damping)
    found = example_importance(operator, generator=generator)
    if found.constant is None:
        weighted = ImportanceOperator(operator, found.probabilities)  # type: ignore[arg-type]  # it has traces
        recipe = measure_recipe(
            weighted, damping, safety=safety, num_time_constants=num_time_constants, generator=generator
        )
        num_matvecs = recipe.num_matvecs + found.num_matvecs
        return dataclasses.replace(recipe, weights=found.probabilities, num_matvecs=num_matvecs)
    leading = top_eigenvalues(operator, 1, rtol=0.03, generator=generator)
    trace, largest = float(found.traces.mean()), float(leading.values[0])
    settings = lissa_hyperparameters(
        trace=max(trace, largest),
        largest_eigenvalue=largest,
        damping=damping,
        constant=safety * found.constant,
        num_time_constants=num_time_constants,
    )
    return LissaRecipe(
        settings,
        Estimate(trace, 0.0, found.num_matvecs),
        largest,
        found.constant,
        num_matvecs=leading.num_matvecs + found.num_matvecs,
        num_sampled_matvecs=0,
        num_sampled_examples=0,
        weights=found.probabilities,
        certified=True,
    )
