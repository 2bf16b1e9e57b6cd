"""How many rows of examples a preconditioner should have: what they cost, and what they save."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, output_curvatures, sampled_traces
from curvlab.curvature.examples import covering_layers, own_gauss_newton, with_examples
from curvlab.curvature.layers import Layer, RecordedLayers
from curvlab.curvature.rows import MAX_OUTPUTS
from curvlab.linalg import LinearOperator
from curvlab.solvers.preconditioners.rows import Rows

_SMALLEST = 64
_LEADING_EXAMPLES = 256  # whose output curvatures say how many rows of an example count
# How steps fall with the share of tr(G) that rows leave. On the MLP fitted to 6,000 MNIST digits, 250, 500, 2,000
# and 4,000 rows leave 0.57, 0.41, 0.14 and 0.09 of the steps, and about 0.7, 0.5, 0.1 and 0.02 of the trace.
_EXPONENT = 0.8
_FEWEST_STEPS = 2.0  # unless all rows are there
_WORTH = 0.8  # of the cost without rows that the cost with them may be: predictions are off by more than a tenth
# Seconds of an operation in the set-up, fp64 and half of it memory, over those of one in a product of the model's
# dtype, measured on a CPU: 927 rows in fp64 3; of models in fp32 2 (64-64-64-10) to 30 (784-128-128-10).
_SLOWER = {torch.float64: 3}
_SLOWER_ELSE = 20


@dataclass(frozen=True)
class RowsPlan:
    """How many rows to take, and why.

    Attributes:
        num_rows: M; 0 where rows cost more than they save.
        share: of tr(G) that the examples hold whose rows these are, as far as M rows go round.
        steps: of block conjugate gradients, predicted with them.
        steps_without: without a preconditioner.
    """

    num_rows: int
    share: float
    steps: float
    steps_without: float

    def __str__(self) -> str:
        """Return the choice with its reason."""
        chosen = f"{self.num_rows:,} rows of examples, {self.share:.0%} of tr(G)," if self.num_rows else "no rows"
        return f"{chosen} {self.steps:.0f} steps predicted ({self.steps_without:.0f} without)"


def predicted_steps(excess: float, num_columns: int, rtol: float) -> float:
    """Return how many steps block conjugate gradients take for K columns, from t = tr(G) / λ alone.

    With condition number κ the error falls by (√κ - 1) / (√κ + 1) a step. In s steps K columns find about K s
    directions, on average K s / 2, and no more than j eigenvalues of G can exceed tr(G) / j, so that
    κ = 1 + 2 t / (K s) is left: s solves s = ln(2 / rtol) / ln((√κ + 1) / (√κ - 1)). At least 1.

    Measured against predicted, 25 columns, rtol 1e-2: 27 and 42 on a fitted regression (Concrete), 11 and 14 on
    digits, 45 and 38 on 6,000 MNIST digits, 3 and 3 at λ = λmax.
    """
    low, high = 1.0, 1e5

    def needed(steps: float) -> float:
        root = math.sqrt(1 + 2 * excess / (num_columns * steps))
        return math.log(2 / rtol) / math.log((root + 1) / (root - 1)) if root > 1 else 0.0

    if needed(low) <= low:
        return low
    for _ in range(60):  # needed() falls with s: bisection
        middle = math.sqrt(low * high)
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return high


def plan_rows(operator: LinearOperator, num_columns: int, *, rtol: float, memory_budget: int) -> RowsPlan | None:
    """Return how many rows make (G + λ I) X = B cheapest to solve; None where rows do not apply.

    They apply to positive semi-definite Gauss-Newton matrices of the whole data, of networks whose parameters all
    lie in linear and convolutional layers, with outputs (N, C). M is tried at 0, 64, 128, ..., all that the budget
    holds, or all there are. The cost of each M is counted in floating-point operations; those of the set-up's
    kernel and factor, which grow with M³, as many times as they are slower than those of a product. Steps are
    `predicted_steps`, times the 0.8th power of the share of tr(G) that the rows leave, as measured. Operations,
    not seconds, so that the same problem always gets the same solver; over processes as if one computed all, so
    that their number changes nothing.

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
    without = predicted_steps(trace / operator.damping, num_columns, rtol)
    plans = []
    for count in [*counts, *([most] if most >= 1 else [])]:
        share = _share(cumulative, count, per_example, everything=count == num_outputs * len(scores))
        least = 1.0 if share == 1 else _FEWEST_STEPS
        steps = min(without, max(least, without * (1 - share) ** _EXPONENT))
        plans.append((work.total(count, steps), RowsPlan(count, share, steps, without)))
    cost, best = min(plans, key=lambda plan: plan[0])
    if cost > _WORTH * plans[0][0]:
        best = plans[0][1]
    return source.ranks.object_from_first(best)  # each has looked at examples of its own


def _share(cumulative: Tensor, num_rows: int, per_example: float, *, everything: bool) -> float:
    """Return the share of the curvature in M rows, of which an example takes so many."""
    if everything:
        return 1.0
    return float(cumulative[min(len(cumulative) - 1, int(num_rows / per_example))])


@dataclass(frozen=True)
class _Work:
    """Floating-point operations of solving, in the unit of one in a product."""

    source: GaussNewtonOperator
    layers: list[Layer]
    num_examples: int
    num_outputs: int
    num_columns: int

    def total(self, num_rows: int, steps: float) -> float:
        """Return those of the set-up, of all steps, and of the residual at the end."""
        size, columns, forward = self.source.shape[0], self.num_columns, self._forward
        step = columns * 10 * self.num_examples * forward + 20 * size * columns**2
        if num_rows == 0:
            return (steps + 1) * step
        examples = min(num_rows, self.num_examples)
        double = _SLOWER.get(self.source.dtype, _SLOWER_ELSE)
        setup = 2 * self.num_examples * forward + 2 * (1 + self.num_outputs) * examples * forward
        setup += double * num_rows**3 * 2 / 3
        apply = double * 2 * num_rows**2 * columns
        for layer, (outputs, inputs) in zip(self.layers, (layer.shape for layer in self.layers), strict=True):
            if isinstance(layer.module, torch.nn.Linear):
                setup += double * (2 * examples**2 * inputs + 2 * num_rows**2 * outputs)
                apply += 4 * examples * outputs * inputs * columns
            else:
                setup += double * 2 * num_rows**2 * outputs * inputs
                apply += 4 * num_rows * outputs * inputs * columns
        return setup + steps * (step + apply) + step

    @property
    def _forward(self) -> float:
        """Multiply-adds of one example's forward."""
        source = self.source
        ((inputs, _),) = source.problem.data.in_fixed_order().select(torch.zeros(1, dtype=torch.long))
        places = RecordedLayers(source.function, self.layers, inputs).num_places()
        return sum(count * math.prod(layer.shape) for count, layer in zip(places, self.layers, strict=True))


def _rows_per_example(source: GaussNewtonOperator) -> tuple[int, float]:
    """Return C, at most `MAX_OUTPUTS`, and tr(S_i)² / tr(S_i²), how many rows count, weighted by tr(S_i)."""
    inputs, targets = next(iter(source.problem.data.in_fixed_order().select(torch.arange(_first(source)))))
    with torch.no_grad():
        outputs = source.problem.outputs(inputs, targets)
        factors = source.loss.hessian_factors(outputs, targets, limit=MAX_OUTPUTS).double()
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
