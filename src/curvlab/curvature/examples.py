"""What single examples contribute to G: traces of their matrices, and quadratic forms by forward passes alone.

G = 1/N sum_i G_i over the N examples (sequences for language models), with G_i = N/n J_iᵀ S_i J_i and n what
the loss's mean divides by (`DataOperator.divisor`), so that the mean of tr(G_i) is tr(G). In fitted networks few
examples hold most of it: importance sampling (`ImportanceOperator`) and `solvers.Rows` build on that.

Traces are fp64 on the CPU, in the order in which `Batches` numbers the examples. Of a matrix whose examples are
spread over processes each computes its own, and all are told those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from curvlab.arguments import whole
from curvlab.curvature.fisher import FisherOperator
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.layers import Layer, RecordedLayers
from curvlab.curvature.linearise import forward_mode, shifted, use_vmap
from curvlab.curvature.operator import MeanOverRanks
from curvlab.linalg import LinearOperator, SumOperator, unflatten, unflatten_columns
from curvlab.problem.batch import Inputs, num_examples, take
from curvlab.problem.model_function import check_finite, without_graph
from curvlab.progress import can_be_silent
from curvlab.seeding import Seed, generator_of

_ANY_SIZE = 2**62
# Gradients of single examples that are held at once, in numbers.
_GRADIENT_NUMBERS = 2**25


# ------------------------------------------------------------------------ matrices that know their examples
def with_examples(operator: LinearOperator) -> GaussNewtonOperator | MeanOverRanks | None:
    """Return the matrix in `operator` whose single examples can be asked for traces and rows; None without one.

    That is a Gauss-Newton matrix of the whole data, by itself or with damping, on one process or on several.
    """
    terms = operator.terms if isinstance(operator, SumOperator) else (operator,)
    sources = [term for term in terms if term.num_examples is not None]
    if len(sources) != 1:
        return None
    (source,) = sources
    if isinstance(source, MeanOverRanks):
        return (
            source if source.is_whole and _is_gauss_newton(own := source.own()) and own.problem.is_whole else None
        )
    return source if _is_gauss_newton(source) and source.problem.is_whole else None


def own_gauss_newton(operator: LinearOperator) -> GaussNewtonOperator:
    """Return the matrix of this process's examples, or raise unless it is a Gauss-Newton matrix of all of them."""
    own = operator.own() if isinstance(operator, MeanOverRanks) else operator
    if not _is_gauss_newton(own):
        raise TypeError(
            f"rows and traces of single examples are those of JᵀSJ: pass a GaussNewtonOperator, got "
            f"{type(own).__name__}"
        )
    if not own.problem.is_whole:
        raise ValueError(
            "traces and rows belong to the whole data, each example once: pass the operator itself, not a sample "
            "of it, nor one with weights"
        )
    return own


def _is_gauss_newton(operator: LinearOperator) -> TypeGuard[GaussNewtonOperator]:
    of_labels = isinstance(operator, FisherOperator) and operator.kind != "exact"
    return isinstance(operator, GaussNewtonOperator) and not of_labels


def covering_layers(operator: GaussNewtonOperator) -> list[Layer] | None:
    """Return the layers if they hold all parameters and each is used once (tried on one example); else None."""
    layers = operator.layers(max_size=_ANY_SIZE)
    if sum(layer.shape[0] * layer.shape[1] for layer in layers) != operator.shape[0]:
        return None
    data = own_gauss_newton(operator).problem.data.in_fixed_order()
    ((inputs, _),) = data.select(torch.zeros(1, dtype=torch.long))
    return layers if RecordedLayers(operator.function, layers, inputs).each_once else None


def recorded(
    operator: GaussNewtonOperator, layers: Sequence[Layer], inputs: Inputs, targets: Tensor
) -> RecordedLayers:
    """Return the batch's outputs, checked, with what `layers` read and gave. Cost: one forward."""
    found = RecordedLayers(operator.function, layers, inputs)
    check_finite(found.outputs)
    operator.loss.check(found.outputs, targets)
    return found


# ----------------------------------------------------------------------------------------------- traces
def has_exact_traces(operator: LinearOperator) -> bool:
    """Return whether `exact_traces` takes this matrix, never an error.

    It does of the whole data of a Gauss-Newton matrix whose parameters are all in linear and convolutional layers,
    each used once, with outputs (N, C). Cost: two forwards of one example.
    """
    own = operator.own() if isinstance(operator, MeanOverRanks) else operator
    if not _is_gauss_newton(own) or not own.problem.is_whole or covering_layers(own) is None:
        return False
    ((inputs, _),) = own.problem.data.in_fixed_order().select(torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        return own.function(own.function.parameters, inputs).ndim <= 2  # not of sequences


@can_be_silent
@torch.inference_mode(False)
def exact_traces(operator: GaussNewtonOperator | MeanOverRanks, *, progress: bool = True) -> Tensor:
    """Return tr(G_i) = N/n sum_r ‖J_iᵀ l_ir‖² with S_i = sum_r l_ir l_irᵀ, exact to rounding, (N,).

    The norm is taken layer by layer, and no gradient is formed: in a linear layer that is used once it is
    ‖signal‖² (‖activation‖² + 1), the 1 for the bias. Where a layer has T places (convolutions), its rows or their
    T x T products are formed for a batch.

    For networks all of whose parameters are in nn.Linear and nn.Conv2d layers, with outputs (N, C): others raise a
    ValueError that says to take `sampled_traces`. Cost: (1 + C) F, F a forward of the data: for 10 classes about
    two products with G. Memory: activations of one batch, C times its signals.
    """
    own = own_gauss_newton(operator)
    layers = covering_layers(own)
    if layers is None:
        raise ValueError(
            "some parameters belong to no nn.Linear or nn.Conv2d layer that is used once (embeddings, scales of "
            "norms, shared weights): exact traces would take a gradient for each example and output. Use "
            "sampled_traces"
        )

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        found = recorded(own, layers, inputs, targets)
        rows = found.rows(own.loss.hessian_factors(found.outputs, targets))
        return torch.stack([part.squares().double().sum(1) for part in rows]).sum(0)

    return _over_data(operator, own, of_batch)


@can_be_silent
@torch.inference_mode(False)
def sampled_traces(
    operator: GaussNewtonOperator | MeanOverRanks,
    *,
    num_draws: int = 1,
    progress: bool = True,
    generator: Seed = 0,
) -> Tensor:
    """Return an unbiased estimate of tr(G_i) for any model, (N,).

    N/n E‖J_iᵀ r‖² for random r with E r rᵀ = S_i, as gradients of log p(ŷ | x_i) by the outputs are for labels ŷ
    drawn from the model; see `OutputLoss.random_factor` for draws that do not leave confident examples to rare
    labels. A sequence has one for each predicted token, independent of one another and of mean 0, so products of
    two tokens vanish in expectation: one gradient norm of the whole sequence is unbiased for the sum over its
    tokens.

    Args:
        operator: G.
        num_draws: draws for each example; their estimates are averaged.
        progress: show a bar.
        generator: of the draws, or a seed. Spread over processes, each has a stream of its own from it.

    Cost: a forward, then for each draw one gradient of each example: F + 2F where all parameters are in linear and
    convolutional layers, 3F and one example at a time otherwise (together through vmap, where that pays).
    """
    whole("num_draws", num_draws)
    own = own_gauss_newton(operator)
    source = generator_of(generator)
    if isinstance(operator, MeanOverRanks):
        source = operator.own_generator(source)
    layers = covering_layers(own)

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        found = recorded(own, layers or [], inputs, targets)
        draws = [own.loss.random_factor(found.outputs, targets, source) for _ in range(num_draws)]
        if layers is not None:
            rows = found.rows(torch.stack(draws))
            return torch.stack([part.squares().double().mean(1) for part in rows]).sum(0)
        return torch.stack([_gradient_squares(own, inputs, draw) for draw in draws]).mean(0)

    return _over_data(operator, own, of_batch)


@can_be_silent
@torch.inference_mode(False)
def output_curvatures(operator: GaussNewtonOperator | MeanOverRanks, *, progress: bool = True) -> Tensor:
    """Return N/n tr(S_i), the curvature of the loss by the outputs, (N,): 1 - sum_c p_c² for a class.

    The cheap score: tr(G_i) without J_i, which varies far less between the examples of a fitted classifier, so it
    ranks them nearly as tr(G_i) does. Constant for nn.MSELoss. Summed over the tokens of a sequence; the logits of
    one batch are held.

    Cost: one forward of the data.
    """
    own = own_gauss_newton(operator)

    def of_batch(inputs: Inputs, targets: Tensor) -> Tensor:
        return own.loss.hessian_traces(own.problem.outputs(inputs, targets), targets).double()

    return _over_data(operator, own, of_batch)


def _over_data(
    operator: GaussNewtonOperator | MeanOverRanks,
    own: GaussNewtonOperator,
    of_batch: Callable[[Inputs, Tensor], Tensor],
) -> Tensor:
    found = own.problem.of_every_example().map(lambda inputs, targets, _: of_batch(inputs, targets), name="traces")
    traces = torch.cat([part.detach().cpu() for part in found])
    traces = traces * (len(traces) / own.divisor)
    return operator.of_all_examples(traces) if isinstance(operator, MeanOverRanks) else traces


def _gradient_squares(operator: GaussNewtonOperator, inputs: Inputs, column: Tensor) -> Tensor:
    """Return ‖J_iᵀ r_i‖² for each example, by one gradient of each, (N,)."""
    function = operator.function
    parameters = function.parameters

    def pulled(values: Sequence[Tensor], one: Inputs, cotangent: Tensor) -> Tensor:
        return (function(values, take(one, None)) * cotangent).sum()

    gradient = grad(pulled)

    def square(one: Inputs, cotangent: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in gradient(parameters, one, cotangent)]).sum()

    count = num_examples(inputs)
    if not use_vmap(function, operator.columns, inputs):
        return torch.stack([square(take(inputs, i), column[i]) for i in range(count)]).double()
    size = max(1, _GRADIENT_NUMBERS // function.num_parameters)
    blocks = [slice(start, start + size) for start in range(0, count, size)]
    return torch.cat([vmap(square)(take(inputs, block), column[block]) for block in blocks]).double()


# -------------------------------------------------------------------------------------- quadratic forms
@runtime_checkable
class HasQuadraticForms(Protocol):
    """An operator with a way of its own to them, such as one that is spread over processes."""

    def quadratic_forms(self, vectors: Tensor) -> Tensor:
        """Return vᵀG v for each column v, (P, K) -> (K,), fp64."""
        ...


@torch.inference_mode(False)
def quadratic_forms(operator: LinearOperator, vectors: Tensor) -> Tensor:
    """Return vᵀG v = 1/n sum_n (J_n v)ᵀ S_n (J_n v) for each column v, (P, K) -> (K,), without a backward pass.

    Klochkov & Liu (2024), App. C. Never negative. J v by forward mode, or by finite differences if the operator
    has them (`jvp="finite_difference"`), as the paper does.

    Cost of each column, in forwards F of the data: 3F, where the product G v costs 5F; memory of a forward that
    keeps nothing for a backward.
    """
    if isinstance(operator, HasQuadraticForms):
        return operator.quadratic_forms(vectors)
    if not isinstance(operator, GaussNewtonOperator):
        raise TypeError(
            f"quadratic forms by forward passes need the factors J and S of a GaussNewtonOperator, got "
            f"{type(operator).__name__}: use curvlab.spectrum.hutchinson_trace, and add damping afterwards."
        )
    if vectors.ndim != 2:
        raise ValueError(f"pass the vectors as columns, (P, K), got shape {tuple(vectors.shape)}")
    operator.check_vectors(vectors, "the matrix of vectors")
    vectors = without_graph(vectors)

    def sums() -> Tensor:
        total = torch.zeros(vectors.shape[1], dtype=torch.float64, device=vectors.device)
        for inputs, targets, weights in operator.passes():
            for start in range(0, vectors.shape[1], operator.max_columns):
                block = slice(start, start + operator.max_columns)
                total[block] += _undivided_quadratic_forms(operator, inputs, targets, weights, vectors[:, block])
        return total

    return operator.problem.memory.run(sums) / operator.divisor


@torch.no_grad()
def _undivided_quadratic_forms(
    operator: GaussNewtonOperator, inputs: Inputs, targets: Tensor, weights: Tensor | None, vectors: Tensor
) -> Tensor:
    """Return the undivided sums over one batch, (P, K) -> (K,), fp64."""
    function, parameters = operator.function, operator.function.parameters

    def outputs_of(values: Sequence[Tensor]) -> Tensor:
        return function(values, inputs)

    def tangent_of(*tangent: Tensor) -> tuple[Tensor, Tensor]:
        outputs, tangents = jvp(outputs_of, (parameters,), (tangent,))[:2]
        return outputs, tangents

    def form(outputs: Tensor, tangents: Tensor) -> Tensor:
        check_finite(outputs)
        operator.loss.check(outputs, targets)
        products = (tangents * operator.loss.hessian_product(outputs, targets, tangents)).double()
        return products.sum() if weights is None else (products.flatten(1).sum(1) * weights.double()).sum()

    if operator.jvp == "finite_difference":
        outputs, forms = outputs_of(parameters), []
        for vector in vectors.unbind(1):
            plus, minus, width = shifted(outputs_of, parameters, vector, step=operator.fd_step)
            forms.append(form(outputs, (plus - minus) / width))
        return torch.stack(forms)
    with forward_mode("build the operator with jvp='finite_difference'"):
        if vectors.shape[1] > 1 and use_vmap(function, operator.columns, inputs):
            outputs, tangents = vmap(tangent_of, out_dims=(None, 0))(  # type: ignore[arg-type]  # None: not mapped
                *unflatten_columns(vectors, parameters)
            )
            return torch.stack([form(outputs, tangent) for tangent in tangents.unbind(0)])
        pairs = [tangent_of(*unflatten(v, parameters)) for v in vectors.unbind(1)]
        return torch.stack([form(*pair) for pair in pairs])
