"""The solver to take where nothing else is asked for."""

from __future__ import annotations

import torch

from curvlab.curvature import GaussNewtonOperator, output_curvatures
from curvlab.curvature.examples import covering_layers, own_gauss_newton, with_examples
from curvlab.linalg import LinearOperator
from curvlab.solvers.block_cg import BlockConjugateGradient
from curvlab.solvers.preconditioners import Nystrom, Rows

# Residual 1e-2 on an overfitted MLP on MNIST, 25 right-hand sides: 1,050 products without a preconditioner; with
# ranks of 2, 4, 6 and 8 times 25, whose set-up is counted, 900, 850, 825 and 825. Where block CG alone needs few
# steps, the set-up costs more than it saves, so the rank is kept small.
_RANK_PER_COLUMN = 4

# bench-solvers: where a sixth of the examples holds 97 % of tr(G), 400 rows take a fourth of Nyström's
# time; where it holds 22 %, as long as no preconditioner. The limit lies between the two, near neither.
_TAIL, _TAIL_SHARE = 6, 0.5


def default_solver(
    size: int, num_columns: int, *, rtol: float = 1e-2, operator: LinearOperator | None = None
) -> BlockConjugateGradient:
    """Return block CG, with a Nyström preconditioner of four times the number of right-hand sides as rank.

    The preconditioner is left out for a single right-hand side, where block CG is CG and there is nothing to
    share, and for matrices so small that the rank would exceed a tenth of their size. The matrix has to be a
    positive semi-definite one plus the damping, as damped Gauss-Newton matrices are.

    Products per right-hand side in benchmarks/solvers, for a residual of 1e-2, set-up included: on an overfitted
    MLP 34 with 25 sides and 18 with 100, where block CG alone takes 43 and 22, and CG 152. Where few steps are
    enough, the set-up does not pay: with 5 sides, 17 instead of 14 on a small OPT and 11 instead of 9 on a
    ResNet-20.

    Memory, in vectors of P numbers: about ten for each column (block CG), and four more for each column for the
    preconditioner, eight while it is set up. Where that is too much (100 sides of a ResNet-18: the preconditioner
    takes 18 GB, and 36 GB while it is set up), use BlockConjugateGradient alone, or fewer sides at a time.

    Args:
        size: P of the (P, P) matrix.
        num_columns: right-hand sides.
        rtol: residual to reach in each.
        operator: G, or G + damping I. Where it is given, a Gauss-Newton matrix of a network of linear and
            convolutional layers is preconditioned by the rows of its hard examples (`Rows`, 256 MiB), if these
            hold most of the curvature (`rows_pay`), as they do in fitted networks: 4 products a system instead of
            14 on a fitted MLP on digits. Cost: one forward of the data.
    """
    if size < 1 or num_columns < 1:
        raise ValueError(f"size and num_columns must be at least 1, got {size} and {num_columns}")
    if operator is not None and rows_pay(operator):
        return BlockConjugateGradient(rtol=rtol, preconditioner=Rows())
    rank = _RANK_PER_COLUMN * num_columns
    if num_columns == 1 or 10 * rank > size:
        return BlockConjugateGradient(rtol=rtol)
    return BlockConjugateGradient(rtol=rtol, preconditioner=Nystrom(rank))


def rows_pay(operator: LinearOperator) -> bool:
    """Return whether a sixth of the examples holds more than half of Σ tr(S_i), their output curvatures.

    False where `Rows` does not apply or costs a gradient for each output: other matrices than positive
    semi-definite Gauss-Newton ones, parameters beyond linear and convolutional layers, sequences of predictions;
    and where its 256 MiB hold fewer rows than these are examples. Where examples are spread over processes all
    of them make this call, and get the same answer. Cost: one forward of the data.
    """
    source = with_examples(operator)
    if source is None or not source.is_psd:
        return False
    own, num_leading = own_gauss_newton(source), max(1, (source.num_examples or 0) // _TAIL)
    if covering_layers(own) is None or not _has_one_prediction(own):
        return False
    if Rows().affordable(source) < num_leading:
        return False
    scores = output_curvatures(source)
    leading = scores.sort(descending=True).values[:num_leading]
    return float(leading.sum()) > _TAIL_SHARE * float(scores.sum())


def _has_one_prediction(source: GaussNewtonOperator) -> bool:
    """Return whether an example has outputs (C,), as `Rows` needs it: a token is no example."""
    ((inputs, _),) = source.sample(1, torch.Generator().manual_seed(0)).batches
    with torch.no_grad():
        return source.function(source.function.parameters, inputs).ndim == 2
