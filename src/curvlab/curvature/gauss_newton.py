"""The Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from torch import Tensor, nn

from curvlab.curvature.batches import Data, Inputs
from curvlab.curvature.data_operator import DataOperator
from curvlab.curvature.jacobian_products import (
    FD_STEP,
    Columns,
    OutputProduct,
    Products,
    finite_difference_product,
    forward_mode,
    forward_product,
    forward_products,
    maps_columns,
    one_column,
)
from curvlab.curvature.losses import CrossEntropy
from curvlab.curvature.token_chunks import finite_difference_product_by_tokens, forward_product_by_tokens


class GaussNewtonOperator(DataOperator):
    """Mean Gauss-Newton matrix G = 1/n sum_n J_nᵀ S_n J_n (Klochkov & Liu 2024, Eq. 4).

    J_n: (C, P), outputs of example n by all trainable parameters; S_n: (C, C), Hessian of the loss by the
    outputs (Diag(p) - p pᵀ for cross-entropy). Symmetric, positive semi-definite, (P, P). Unit: loss (nats)
    per squared parameter; n and S as the loss's reduction has them (nn.MSELoss() also averages outputs:
    S = 2/C I). No damping: add it visibly, `op + damping * identity`.

    Args:
        model: see DataOperator.
        loss: see DataOperator.
        data: see DataOperator.
        jvp: J v by forward mode (exact), or by the paper's central finite differences, which need no
            forward-mode derivatives of the model's kernels.
        fd_step: norm of the finite difference's perturbation of the parameters; 1e-3 in fp32 and 1e-6 in fp64
            by default.
        batch_size: see DataOperator.
        columns: see DataOperator; finite differences always loop.

    Cost of one product, in forwards F of the data: 4F in forward mode, 5F by finite differences. K products
    together: 2F + 3F each with vmap. Memory: activations of one batch, twice in forward mode. The logits of causal
    language models are never held as a whole (see token_chunks): batch_size sequences cost their activations.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Data,
        *,
        jvp: Literal["forward", "finite_difference"] = "forward",
        fd_step: float | None = None,
        batch_size: int = 512,
        columns: Columns = "auto",
    ) -> None:
        super().__init__(model, loss, data, batch_size=batch_size, columns=columns)
        if jvp not in ("forward", "finite_difference"):
            raise ValueError(f"jvp must be 'forward' or 'finite_difference', got {jvp!r}")
        if fd_step is not None and fd_step <= 0:
            raise ValueError(f"fd_step must be positive, got {fd_step}")
        self.jvp = jvp
        self.fd_step = fd_step if fd_step is not None else FD_STEP.get(self.dtype, 1e-2)

    @property
    def is_psd(self) -> bool:
        """True: S is positive semi-definite for the losses that are supported."""
        return True

    def _output_product(self, targets: Tensor, outputs: Tensor, tangents: Tensor) -> Tensor:
        self.loss.check(outputs, targets)
        return self.loss.hessian_product(outputs, targets, tangents)

    def _batch_products(self, inputs: Inputs, targets: Tensor, vectors: Tensor) -> Iterator[Products]:
        with forward_mode(f"pass jvp='finite_difference' to {type(self).__name__}"):
            if self._by_tokens(inputs, targets):
                for index, v in enumerate(vectors.unbind(1)):
                    yield one_column(index, [self._product_by_tokens(inputs, targets, v)])
                return
            output_product = partial(self._output_product, targets)
            if (
                self.jvp == "forward"
                and vectors.shape[1] > 1
                and maps_columns(self.function, self.columns, inputs)
            ):
                yield slice(None), forward_products(self.function, inputs, vectors, output_product)
                return
            for index, v in enumerate(vectors.unbind(1)):
                yield one_column(index, self._product(inputs, v, output_product))

    def _product(self, inputs: Inputs, vector: Tensor, output_product: OutputProduct) -> list[Tensor]:
        if self.jvp == "forward":
            return forward_product(self.function, inputs, vector, output_product)
        return finite_difference_product(self.function, inputs, vector, output_product, step=self.fd_step)

    def _by_tokens(self, inputs: Inputs, targets: Tensor) -> bool:
        """Whether every token is a prediction of its own, made by a last linear layer."""
        if self.columns == "vmap" or not isinstance(self.loss, CrossEntropy) or targets.ndim != 2:
            return False
        return self.function.has_linear_head(inputs)

    def _product_by_tokens(self, inputs: Inputs, targets: Tensor, vector: Tensor) -> Tensor:
        if self.jvp == "forward":
            return forward_product_by_tokens(self.function, inputs, targets, vector, self._output_product)
        return finite_difference_product_by_tokens(
            self.function, inputs, targets, vector, self._output_product, step=self.fd_step
        )
