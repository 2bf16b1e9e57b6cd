"""The constant of condition C.1 between two bounds, from every example by itself: no batches are drawn.

With one example a draw condition C.1 is E G_i² - G² ⪯ C tr(G) G. In a direction v it asks for

    C tr(G) >= [E‖G_i v‖² - ‖G v‖²] / vᵀGv =: s(v),

which the mean over all examples gives without sampling error, and from above max_i λmax(G_i) is enough, because
G_i² ⪯ λmax(G_i) G_i; where traces are exact max_i tr(G_i), which is larger, stands for it. Neither needs tr(G): it
drops out of C tr(G) / λmax(G), the batch size of Theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.examples import exact_traces, has_exact_traces
from curvlab.lab import Run, unit
from curvlab.lab.runs.over_ranks import operator_on_ranks
from curvlab.problem import stack
from curvlab.problem.own_losses import output_loss
from curvlab.spectrum import top_eigenvalues
from experiments.shared.spectrum import gauss_newton
from experiments.shared.task import TrainedTask

# Ours, for the paper gives no training loss: ResNets on ImageNet and language models end at about 1 or more.
# From this loss on a network counts as unsaturated.
UNSATURATED_LOSS = 0.5

MOST_EXAMPLES = 512  # whose λmax is taken one by one, where traces are not to be had


@unit("lissa/constant_bounds", version=1, about="bounds of the constant of condition C.1 of {seed_name}")
def constant_bounds(task: TrainedTask, /, *, num_leading: int, num_random: int, **_: Any) -> dict[str, Any]:
    """Return C tr(G) of condition C.1 between bounds, and tr(G) where it is exact; units of |B| in predictions.

    `leading`, `random`, `example`: s(v) at leading eigenvectors, normal vectors, and the leading eigenvector of
    the example with the most curvature; `at_least`, the largest of them. `at_most`: max_i tr(G_i) where traces are
    exact, else max_i λmax(G_i) by Lanczos with its error bound; infinite where neither is to be had. `trace`:
    mean of tr(G_i), else nan.

    Args:
        task: network and examples; sequences count by their predicted tokens.
        num_leading: how many eigenvectors.
        num_random: how many normal vectors.

    Cost: a product with G for each direction, Lanczos on G, and the traces or Lanczos on each example.
    """
    run, generator = task.run, task.generator("constant bounds")
    most, trace, place = _largest_example(run, task, generator)
    operator = gauss_newton(task)
    leading = top_eigenvalues(operator, num_leading, rtol=0.03, generator=generator)
    random = operator.randn(num_random, generator)
    pointed = top_eigenvalues(_example(task, place)[0], 1, rtol=0.03, generator=generator)
    run.add_matvecs(leading.num_matvecs)
    found = _spreads(run, task, torch.cat([leading.vectors, random, pointed.vectors], dim=1))
    return {
        "leading": found[:num_leading].tolist(),
        "random": found[num_leading:-1].tolist(),
        "example": float(found[-1]),
        "at_least": float(found.max()),
        "at_most": most * task.predictions_per_example,
        "trace": trace,
    }


def _spreads(run: Run, task: TrainedTask, directions: torch.Tensor) -> torch.Tensor:
    """Return s(v) for each column, times the predictions of an example, (P, K) -> (K,)."""
    mean = torch.zeros_like(directions)
    squares = torch.zeros(directions.shape[1], dtype=torch.float64, device=directions.device)
    for operator, weight in _examples(task):
        product = weight * (operator @ directions)
        mean = mean + product / task.num_train
        squares = squares + operator.inner(product, product).double() / task.num_train
    run.add_matvecs(directions.shape[1])
    forms, lengths = (operator.inner(vectors, mean).double() for vectors in (directions, mean))
    return ((squares - lengths) / forms * task.predictions_per_example).cpu()


def _largest_example(run: Run, task: TrainedTask, generator: torch.Generator) -> tuple[float, float, int]:
    """Return an upper bound of max_i λmax(G_i), tr(G) or nan, and the place of that example."""
    operator = gauss_newton(task, spread=False)
    if has_exact_traces(operator):  # a model that is cut up over processes has none either
        traces = exact_traces(operator)
        return float(traces.max()), float(traces.mean()), int(traces.argmax())
    if task.num_train > MOST_EXAMPLES:
        return math.inf, math.nan, 0
    bounds, products = [], 0
    for operator, weight in _examples(task):
        found = top_eigenvalues(operator, 1, rtol=0.03, generator=generator)
        bounds.append(weight * float(found.values[0] + found.error_bounds[0]))
        products += found.num_matvecs
    run.add_matvecs(products // task.num_train)
    place = max(range(len(bounds)), key=bounds.__getitem__)
    return bounds[place], math.nan, place


def _examples(task: TrainedTask) -> Iterator[tuple[GaussNewtonOperator, float]]:
    return (_example(task, place) for place in range(task.num_train))


def _example(task: TrainedTask, place: int) -> tuple[GaussNewtonOperator, float]:
    """Return the operator on one example, and what makes it G_i, whose mean is G: its share of the predictions."""
    inputs, targets = stack(task.train, torch.tensor([place]))
    share = output_loss(task.loss).count(targets) / task.predictions_per_example if task.is_language else 1.0
    operator: GaussNewtonOperator = operator_on_ranks(
        GaussNewtonOperator, task.model, task.loss, (inputs, targets), spread=False
    )
    return operator, share
