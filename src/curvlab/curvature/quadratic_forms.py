"""Quadratic forms of the Gauss-Newton matrix by forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import jvp, vmap

from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.jacobian_products import forward_mode, use_vmap
from curvlab.linalg import LinearOperator, unflatten, unflatten_columns
from curvlab.problem.batch import Inputs, without_graph
from curvlab.problem.model_function import check_finite


@runtime_checkable
class HasQuadraticForms(Protocol):
    """An operator with a way of its own to them, such as one whose data is spread over processes."""

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

    return operator.problem.within_memory(sums) / operator.divisor


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

    with torch.no_grad():
        if operator.jvp == "finite_difference":
            outputs = outputs_of(parameters)
            differences = [_difference(operator, outputs_of, parameters, v) for v in vectors.unbind(1)]
            return torch.stack([form(outputs, difference) for difference in differences])
        with forward_mode("build the operator with jvp='finite_difference'"):
            if vectors.shape[1] > 1 and use_vmap(function, operator.columns, inputs):
                outputs, tangents = vmap(tangent_of, out_dims=(None, 0))(  # type: ignore[arg-type]  # None: not mapped
                    *unflatten_columns(vectors, parameters)
                )
                return torch.stack([form(outputs, tangent) for tangent in tangents.unbind(0)])
            pairs = [tangent_of(*unflatten(v, parameters)) for v in vectors.unbind(1)]
            return torch.stack([form(*pair) for pair in pairs])


def _difference(
    operator: GaussNewtonOperator,
    outputs_of: Callable[[Sequence[Tensor]], Tensor],
    parameters: Sequence[Tensor],
    vector: Tensor,
) -> Tensor:
    """Return J v by a central difference whose perturbation has the norm `operator.fd_step`."""
    delta = operator.fd_step / torch.linalg.vector_norm(vector).clamp(min=torch.finfo(vector.dtype).tiny)
    tangents = unflatten(vector, parameters)
    shifted = [
        outputs_of([value + sign * delta * t for value, t in zip(parameters, tangents, strict=True)])
        for sign in (1.0, -1.0)
    ]
    return (shifted[0] - shifted[1]) / (2 * delta)
