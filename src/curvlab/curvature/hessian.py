"""The Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from curvlab.curvature.linearise import ColumnSums, forward_mode, tangents_of, use_vmap
from curvlab.curvature.operator import DataOperator
from curvlab.problem.batch import Inputs
from curvlab.problem.model_function import check_finite
from curvlab.problem.own_losses import FunctionLoss


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
        loss, function = self.problem.loss, self.problem.function
        parameters = function.parameters
        together = len(rows) > 1 and use_vmap(function, self.columns, inputs)
        # Under vmap no value can be looked at; a loss of one's own remembers outputs that it has checked.
        checked = together or isinstance(loss, FunctionLoss)
        if checked:
            self.problem.outputs(inputs, targets)

        def total_loss(values: Sequence[Tensor]) -> Tensor:
            outputs = function(values, inputs)
            if not checked:
                check_finite(outputs)
                loss.check(outputs, targets)
            return loss.total(outputs, targets, weights)

        def product(*tangents: Tensor) -> Sequence[Tensor]:
            if loss.twice_backward:  # forward mode may not exist for the function's own backward
                return vjp(grad(total_loss), parameters)[1](tangents)[0]
            return jvp(grad(total_loss), (parameters,), (tangents,))[1]

        with forward_mode("use GaussNewtonOperator with jvp='finite_difference' instead of the Hessian"):
            if together:
                sums.add(vmap(product)(*tangents_of(rows, parameters)))
                return
            for index, row in enumerate(rows):
                sums[index : index + 1].add([piece[None] for piece in product(*tangents_of(row, parameters))])
