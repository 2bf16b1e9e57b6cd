"""How many rows of examples a preconditioner should have: what they cost, and what they save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, output_curvatures, sampled_traces
from curvlab.curvature.examples import covering_layers, own_gauss_newton, with_examples
from curvlab.curvature.layers import Layer, RecordedLayers
from curvlab.curvature.rows import MAX_OUTPUTS
from curvlab.linalg import LinearOperator
from curvlab.problem.batch import Inputs
from curvlab.solvers.preconditioners.rows import Rows
from curvlab.solvers.solver import predicted_steps, steps_at_condition

_SMALLEST = 64
_LEADING_EXAMPLES = 256  # whose output curvatures say how many rows of an example count
# How steps fall with the share of tr(G) that rows leave. On the MLP fitted to 6,000 MNIST digits, 250, 500, 2,000
# and 4,000 rows leave 0.57, 0.41, 0.14 and 0.09 of the steps, and about 0.7, 0.5, 0.1 and 0.02 of the trace. Where
# they hold little of it, they still know the leading directions (`predicted_steps`): the smaller number counts.
_EXPONENT = 0.8
_ALIKE = 1.01  # largest over smallest output curvature of examples of which none is chosen for its own
_FEWEST_STEPS = 2.0  # unless all rows are there
_STEP_MORE = 1.0  # than predicted from the directions, as measured
_WORTH = 0.8  # of the cost without rows that the cost with them may be: predictions are off by more than a tenth
# Seconds on a core of an AMD EPYC, over those of a multiply-add of a column of a product in single precision:
_SECONDS = 44e-12
# Products of six networks (8-50-1 to 784-128-128-10), 25 columns, by multiply-adds and outputs of layers: within
# 15 %; a small ConvNet takes 1.7 times as long. Set-ups of 512 to 4,096 rows within 30 %, of a network of 705
# parameters two thirds. In 27 regressions (N 200 to 20,000, P 705 and 10,001, 1 to 25 columns, λ 1e-1 to 1e-5) the
# choice took at most 1.2 times the CPU seconds of the fastest of none, 128 to 4,096 and all rows in 23, and up to
# 2.5 times, 0.2 s at most, in four; the (P, P) matrix by products took longer in 18 of the 21 of 705 parameters.
# 196-32-10 on 17,000, 18,000 and 60,000 MNIST digits, 10 columns, λ = 1e-3: 1.2, 1.3 and 5.0 s, without rows 2.6,
# 2.8 and 9.3; at λ = λmax none. With random weights, whose spectrum is flat, there 512 rows: 0.65 s for 0.45.
_MULTIPLY_ADD = {torch.float64: 2.0}  # in a product; 1 in other dtypes
_OUTPUT = 220.0  # of a layer, with its activation, there and back
_CALL, _CALLS_OF_SETUP = 3e7, 10  # a product or an application of the inverse, whatever its size: 1.3 ms
_COLUMNS_FOR_ALL = 2  # what a product does once for all columns, in columns
_PASS = 0.5  # a forward, or a backward for one row of an example, in columns
_PAIR, _PAIR_OF_LAYER = 570.0, 390.0  # of rows, in the fp64 kernel, its largest eigenvalue, and each layer's part
_CUBE = 0.28  # of M, in the fp64 factor
_SOLVED = 15.0  # per pair of rows and column, in its two triangular systems


@dataclass(frozen=True)
class RowsPlan:
    """How many rows to take, and why.

    Attributes:
        num_rows: M; 0 where rows cost more than they save.
        share: of tr(G) that the examples hold whose rows these are, as far as M rows go round.
        steps: of block conjugate gradients, predicted with them.
        steps_without: without a preconditioner.
        seconds: that set-up and steps take on one core of an AMD EPYC, counted.
    """

    num_rows: int
    share: float
    steps: float
    steps_without: float
    seconds: float

    def __str__(self) -> str:
        """Return the choice with its reason."""
        chosen = f"{self.num_rows:,} rows of examples, {self.share:.0%} of tr(G)," if self.num_rows else "no rows"
        return f"{chosen} {self.steps:.0f} steps predicted ({self.steps_without:.0f} without)"


def plan_rows(operator: LinearOperator, num_columns: int, *, rtol: float, memory_budget: int) -> RowsPlan | None:
    """Return how many rows make (G + λ I) X = B cheapest to solve; None where rows do not apply.

    They apply to positive semi-definite Gauss-Newton matrices of the whole data, of networks whose parameters all
    lie in linear and convolutional layers, with outputs (N, C). M is tried at 0, 64, 128, ..., all that the budget
    holds, or all there are. The cost of each M is that of the seconds that its parts took on one machine: counted,
    not timed, so that the same problem always gets the same solver; over processes as if one computed all, so that
    their number changes nothing. Steps are `predicted_steps` for what the rows leave of tr(G), and one, or those
    without rows times the 0.8th power of the share that is left, if that is less.

    Args:
        operator: G + λ I.
        num_columns: K, columns of B.
        rtol: residual to reach.
        memory_budget: bytes for the rows, see `Rows`.

    Cost: 4F, F a forward of the data: less than one product.
    """
    source = with_examples(operator)
    if source is None or not source.is_psd or operator.damping <= 0:
        return None
    own = own_gauss_newton(source)
    layers = covering_layers(own)
    if layers is None or not _has_one_prediction(own):
        return None
    scores = output_curvatures(source).sort(descending=True).values
    if float(scores.sum()) == 0:
        return None
    cumulative = torch.cat([scores.new_zeros(1), scores.cumsum(0)])
    cumulative = (cumulative / cumulative[-1]).clamp(max=1)
    trace = float(sampled_traces(source, generator=torch.Generator().manual_seed(0)).mean())
    num_outputs, per_example = _rows_per_example(own)
    work = _Work(own, layers, len(scores), num_outputs, num_columns)
    most = min(Rows(memory_budget=memory_budget).affordable(source), num_outputs * len(scores))
    counts = [0, *(2**k for k in range(int(math.log2(_SMALLEST)), 40) if 2**k < most)]
    excess = trace / operator.damping
    without = predicted_steps(excess, num_columns, rtol)
    alike = float(scores[0]) <= _ALIKE * float(scores[-1])
    plans = []
    for count in [*counts, *([most] if most >= 1 else [])]:
        share = _share(cumulative, count, per_example, everything=count == num_outputs * len(scores))
        known = _STEP_MORE + predicted_steps(excess * (1 - share), num_columns, rtol, num_known=count)
        if own.shape[0] < count and alike:
            known = min(known, _STEP_MORE + _steps_by_sample(share, own.shape[0] / count, rtol))
        least = 1.0 if share == 1 else _FEWEST_STEPS
        steps = min(without, max(least, min(known, without * (1 - share) ** _EXPONENT)))
        plans.append(RowsPlan(count, share, steps, without, _SECONDS * work.total(count, steps)))
    best = min(plans, key=lambda plan: plan.seconds)
    if best.seconds > _WORTH * plans[0].seconds:
        best = plans[0]
    return source.ranks.object_from_first(best)  # each has looked at examples of its own


def _steps_by_sample(share: float, size_to_rows: float, rtol: float) -> float:
    """Return how many steps M rows leave that are more than the P parameters, and no larger than the others.

    RᵀR is then a sample of G, of that share, whose smallest eigenvalues are (1 - √(P / M))² of what they are in
    the mean (Marchenko & Pastur). Regression of 20,000 points, 705 parameters, λ = 1e-5, 10 columns: 2,048 and
    4,096 rows take 20 and 12 steps, as predicted here; by what they hold of the trace it would be 128 and 92.
    """
    return steps_at_condition(1 / (share * (1 - math.sqrt(size_to_rows)) ** 2), rtol)


def _share(cumulative: Tensor, num_rows: int, per_example: float, *, everything: bool) -> float:
    """Return the share of the curvature in M rows, of which an example takes so many."""
    if everything:
        return 1.0
    return float(cumulative[min(len(cumulative) - 1, int(num_rows / per_example))])


@dataclass(frozen=True)
class _Work:
    """Time of solving, in multiply-adds of a column of a product in single precision."""

    source: GaussNewtonOperator
    layers: list[Layer]
    num_examples: int
    num_outputs: int
    num_columns: int

    def total(self, num_rows: int, steps: float) -> float:
        """Return that of the set-up, of all steps, and of the residual at the end."""
        size, columns, column = self.source.shape[0], self.num_columns, self._column
        step = _CALL + (columns + _COLUMNS_FOR_ALL) * self.num_examples * column + 5 * size * columns**2
        if num_rows == 0:
            return (steps + 1) * step
        examples, pairs = min(num_rows, self.num_examples), num_rows**2
        setup = _CALLS_OF_SETUP * _CALL
        setup += _PASS * column * (self.num_examples + (1 + self.num_outputs) * examples)
        setup += _CUBE * num_rows**3 + pairs * (_PAIR + _PAIR_OF_LAYER * len(self.layers))
        apply = _SOLVED * pairs
        for layer, (outputs, inputs) in zip(self.layers, (layer.shape for layer in self.layers), strict=True):
            if isinstance(layer.module, torch.nn.Linear):
                setup += examples**2 * inputs + pairs * outputs
                apply += examples * outputs * inputs
            else:
                setup += pairs * outputs * inputs
                apply += 2 * num_rows * outputs * inputs
        return setup + steps * (step + _CALL + apply * columns) + step

    @cached_property
    def _column(self) -> float:
        """A column's share of a product, of one example."""
        source = self.source
        ((inputs, _),) = source.problem.data.in_fixed_order().select(torch.zeros(1, dtype=torch.long))
        places = RecordedLayers(source.function, self.layers, inputs).num_places()
        each = _MULTIPLY_ADD.get(source.dtype, 1.0)
        return sum(
            count * (each * math.prod(layer.shape) + _OUTPUT * layer.shape[0])
            for count, layer in zip(places, self.layers, strict=True)
        )


def _rows_per_example(source: GaussNewtonOperator) -> tuple[int, float]:
    """Return C, at most `MAX_OUTPUTS`, and tr(S_i)² / tr(S_i²), how many rows count, weighted by tr(S_i)."""

    def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> Tensor:
        return source.loss.hessian_factors(source.problem.outputs(inputs, targets), targets, limit=MAX_OUTPUTS)

    leading = source.problem.of_every_example().part(torch.arange(_first(source)))
    with torch.no_grad():
        factors = torch.cat(list(leading.map(of_batch)), dim=1).double()
    kernels = torch.einsum("rnc,rnd->ncd", factors, factors)
    traces, squares = kernels.diagonal(dim1=1, dim2=2).sum(1), kernels.square().sum((1, 2))
    if float(squares.sum()) == 0:
        return len(factors), float(len(factors))
    return len(factors), float(traces.square().sum() / squares.sum())


def _first(source: GaussNewtonOperator) -> int:
    return min(_LEADING_EXAMPLES, source.num_examples)


def _has_one_prediction(source: GaussNewtonOperator) -> bool:
    """Return whether an example has outputs (C,), as `Rows` needs it: a token is no example."""
    ((inputs, _),) = source.sample(1, torch.Generator().manual_seed(0)).batches
    with torch.no_grad():
        return source.function(source.function.parameters, inputs).ndim == 2
