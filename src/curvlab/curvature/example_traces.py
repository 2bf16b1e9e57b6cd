"""Traces of single examples' Gauss-Newton matrices: where a network's curvature sits.

G = 1/N sum_i G_i over the N examples (sequences for language models), with G_i = N/n J_iᵀ S_i J_i and n what
the loss's mean divides by (`DataOperator.divisor`), so that the mean of tr(G_i) is tr(G). In fitted networks few
examples hold most of it: importance sampling (`ImportanceOperator`) and `solvers.Rows` build on that.

All functions return fp64 on the CPU, in the order in which `Batches` numbers the examples. Of a matrix whose
examples are spread over processes each computes its own, and all are told those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap

from curvlab.curvature.example_rows import (
    checked_operator,
    covering_layers,
    output_factors,
    output_traces,
    own_gauss_newton,
    random_factor,
    run_recorded,
)
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.jacobian_products import use_vmap
from curvlab.curvature.mean_over_ranks import MeanOverRanks
from curvlab.problem.batch import Inputs, num_examples, take
from curvlab.problem.data import Batches
from curvlab.problem.model_function import check_finite

# Gradients of single examples that are held at once, in numbers.
_GRADIENT_NUMBERS = 2**25


@torch.inference_mode(False)
def exact_traces(operator: GaussNewtonOperator | MeanOverRanks) -> Tensor:
    """Return tr(G_i) = N/n sum_r ‖J_iᵀ l_ir‖² with S_i = sum_r l_ir l_irᵀ, exact to rounding, (N,).

    The norm is taken layer by layer, and no gradient is formed: in a linear layer that is used once it is
    ‖signal‖² (‖activation‖² + 1), the 1 for the bias. Where a layer has T places (convolutions), its rows or their
    T x T products are formed for a batch.

    For networks all of whose parameters are in nn.Linear and nn.Conv2d layers, with outputs (N, C): others raise a
    ValueError that says to take `sampled_traces`. Cost: (1 + C) F, F a forward of the data: for 10 classes about
    two products with G. Memory: activations of one batch, C times its signals.
    """
    if isinstance(operator, MeanOverRanks):
        return operator.of_all_examples(exact_traces(own_gauss_newton(operator)))
    batches = checked_operator(operator)
    layers = covering_layers(operator)
    if layers is None:
        raise ValueError(
            "some parameters belong to no nn.Linear or nn.Conv2d layer that is used once (embeddings, scales of "
            "norms, shared weights): exact traces would take a gradient for each example and output. Use "
            "sampled_traces"
        )

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        recorded = run_recorded(operator, layers, inputs, targets)
        rows = recorded.rows(output_factors(operator.loss, recorded.outputs, targets))
        return torch.stack([part.squares().double().sum(1) for part in rows]).sum(0)

    return _over_data(operator, batches, of_batch)


@torch.inference_mode(False)
def sampled_traces(
    operator: GaussNewtonOperator | MeanOverRanks, *, num_draws: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Return an unbiased estimate of tr(G_i) for any model, (N,).

    N/n E‖J_iᵀ r‖² for random r with E r rᵀ = S_i, as gradients of log p(ŷ | x_i) by the outputs are for labels ŷ
    drawn from the model; see `random_factor` for draws that do not leave confident examples to rare labels. A
    sequence has one for each predicted token, independent of one another and of mean 0, so products of two tokens
    vanish in expectation: one gradient norm of the whole sequence is unbiased for the sum over its tokens.

    Args:
        operator: G.
        num_draws: draws for each example; their estimates are averaged.
        generator: of the draws; seed 0 by default. Spread over processes, each has a stream of its own from it.

    Cost: a forward, then for each draw one gradient of each example: F + 2F where all parameters are in linear and
    convolutional layers, 3F and one example at a time otherwise (together through vmap, where that pays).
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, got {num_draws}")
    if isinstance(operator, MeanOverRanks):
        own = sampled_traces(
            own_gauss_newton(operator), num_draws=num_draws, generator=operator.own_generator(generator)
        )
        return operator.of_all_examples(own)
    batches = checked_operator(operator)
    layers = covering_layers(operator)
    source = generator if generator is not None else torch.Generator().manual_seed(0)

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        recorded = run_recorded(operator, layers if layers is not None else [], inputs, targets)
        columns = torch.stack(
            [random_factor(operator.loss, recorded.outputs, targets, source) for _ in range(num_draws)]
        )
        if layers is not None:
            return torch.stack([part.squares().double().mean(1) for part in recorded.rows(columns)]).sum(0)
        return torch.stack([_gradient_squares(operator, inputs, column) for column in columns]).mean(0)

    return _over_data(operator, batches, of_batch)


@torch.inference_mode(False)
def output_curvatures(operator: GaussNewtonOperator | MeanOverRanks) -> Tensor:
    """Return N/n tr(S_i), the curvature of the loss by the outputs, (N,): 1 - sum_c p_c² for a class.

    The cheap score: tr(G_i) without J_i, which varies far less between the examples of a fitted classifier, so it
    ranks them nearly as tr(G_i) does. Constant for nn.MSELoss. Summed over the tokens of a sequence; the logits of
    one batch are held.

    Cost: one forward of the data.
    """
    if isinstance(operator, MeanOverRanks):
        return operator.of_all_examples(output_curvatures(own_gauss_newton(operator)))

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = operator.function(operator.function.parameters, inputs)
            check_finite(outputs)
            operator.loss.check(outputs, targets)
            return output_traces(operator.loss, outputs, targets).double()

    return _over_data(operator, checked_operator(operator), of_batch)


def _over_data(
    operator: GaussNewtonOperator, batches: Batches, of_batch: Callable[[Inputs, Tensor], Tensor]
) -> Tensor:
    traces = torch.cat([of_batch(inputs, targets).detach().cpu() for inputs, targets in batches])
    return traces * (len(traces) / operator.divisor)


def _gradient_squares(operator: GaussNewtonOperator, inputs: Inputs, column: Tensor) -> Tensor:
    """Return ‖J_iᵀ r_i‖² for each example, by one gradient of each, (N,)."""
    function = operator.function
    parameters = function.parameters

    def pulled(values: Sequence[Tensor], one: Inputs, cotangent: Tensor) -> Tensor:
        single = {name: value[None] for name, value in one.items()} if not isinstance(one, Tensor) else one[None]
        return (function(values, single) * cotangent).sum()

    gradient = grad(pulled)

    def square(one: Inputs, cotangent: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in gradient(parameters, one, cotangent)]).sum()

    count = num_examples(inputs)
    if not use_vmap(function, operator.columns, inputs):
        return torch.stack([square(take(inputs, i), column[i]) for i in range(count)]).double()
    size = max(1, _GRADIENT_NUMBERS // function.num_parameters)
    blocks = [slice(start, start + size) for start in range(0, count, size)]
    return torch.cat([vmap(square)(take(inputs, block), column[block]) for block in blocks]).double()
