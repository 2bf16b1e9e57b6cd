"""The Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from curvlab.curvature.linearise import ColumnSums, forward_mode, tangents_of, use_vmap
from curvlab.curvature.operator import DataOperator
from curvlab.problem.batch import Inputs


class HessianOperator(DataOperator):
    """Mean Hessian H = 1/n sum_n ∇²l_n of the loss by all trainable parameters.

    Symmetric, indefinite in general, (P, P). Unit: loss (nats) per squared parameter, no damping. Products by
    forward-over-reverse differentiation: H v is the derivative of the gradient along v (Pearlmutter 1994).

    Args: those of DataOperator.

    Cost of one product, in forwards F of the data: about 6F (a gradient and its tangent). Memory: activations
    of one batch, twice.
    """

    def _copies(self, columns: int) -> float:
        return 1.5 * (columns + 1)  # measured: 2.0 to 2.7 for a vector, 18 to 23 for 16 through vmap

    def _add_products(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None, rows: Tensor, sums: ColumnSums
    ) -> None:
        parameters = self.function.parameters
        self.problem.outputs(inputs, targets)

        def total_loss(values: Sequence[Tensor]) -> Tensor:
            return self.loss.total(self.function(values, inputs), targets, weights)

        def product(*tangents: Tensor) -> Sequence[Tensor]:
            if self.loss.twice_backward:  # forward mode may not exist for the function's own backward
                return vjp(grad(total_loss), parameters)[1](tangents)[0]
            return jvp(grad(total_loss), (parameters,), (tangents,))[1]

        with forward_mode("use GaussNewtonOperator with jvp='finite_difference' instead of the Hessian"):
            if len(rows) > 1 and use_vmap(self.function, self.columns, inputs):
                sums.add(vmap(product)(*tangents_of(rows, parameters)))
                return
            for index, row in enumerate(rows):
                sums[index].add([piece[None] for piece in product(*tangents_of(row, parameters))])
