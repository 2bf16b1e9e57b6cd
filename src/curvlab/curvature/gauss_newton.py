"""The Gauss-Newton matrix."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlab.arguments import positive
from curvlab.curvature.language import FEWER_LOGITS, LOGITS_PER_CHUNK, linearise_by_tokens
from curvlab.curvature.linearise import (
    FD_STEP,
    Columns,
    ColumnSums,
    forward_mode,
    linearise,
    linearise_together,
    tangents_of,
    use_vmap,
)
from curvlab.curvature.operator import DataOperator
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.batch import Inputs, weighted
from curvlab.problem.memory import activation_bytes
from curvlab.problem.model_function import check_finite, check_mode
from curvlab.problem.own_losses import FunctionLoss
from curvlab.problem.records import Records, module_state

MOST_NUMBERS_RECORDED = 2**18  # K P of products that are replayed: above, kernels outweigh the Python


class GaussNewtonOperator(DataOperator):
    """Mean Gauss-Newton matrix G = 1/n sum_n J_nᵀ S_n J_n (Klochkov & Liu 2024, Eq. 4).

    J_n: (C, P), outputs of example n by all trainable parameters; S_n: (C, C), Hessian of the loss by the
    outputs (Diag(p) - p pᵀ for cross-entropy). Symmetric, (P, P), positive semi-definite where the loss is
    convex in the outputs (`is_psd`). Unit: loss (nats) per squared parameter; n and S as the loss's reduction has
    them (nn.MSELoss() also averages outputs: S = 2/C I). No damping: add it visibly, `op + damping * identity`.
    Of a loss that is linear in the outputs (nn.NLLLoss, nn.L1Loss) G is zero: a warning says so.

    Args beside those of DataOperator:
        jvp: J v by forward mode (exact), or by the paper's central finite differences, which need no
            forward-mode derivatives of the model's kernels; vectors then go one by one.
        fd_step: norm of the finite difference's perturbation of the parameters; 1e-3 in fp32 and 1e-6 in fp64
            by default.
        low_memory: take each product in two passes (`linearise`): about the memory of a gradient
            step, for 6F instead of 5F, vectors one after another. The same numbers up to rounding.

    Cost of one product, in forwards F of the data: 5F, by forward mode (the tangents' forward is 2F) and by finite
    differences. K products together: 2F + 4F each with vmap, 5F each without. Memory: activations of one batch,
    twice in forward mode (once with `low_memory`). The logits of causal language models are never held as a whole
    (`linearise_by_tokens`): batch_size sequences cost their activations.

    The operations of products of several vectors are recorded after 50 calls where K P is small, and replayed with
    the model as it is then: parameters, buffers, modes, hooks, settings. Globals that forward reads are those of
    the record.
    """

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        data: Data | None = None,
        *,
        jvp: Literal["forward", "finite_difference"] = "forward",
        fd_step: float | None = None,
        low_memory: bool = False,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        columns: Columns = "auto",
    ) -> None:
        super().__init__(model, loss, data, batch_size=batch_size, memory_budget=memory_budget, columns=columns)
        if jvp not in ("forward", "finite_difference"):
            raise ValueError(f"jvp must be 'forward' or 'finite_difference', got {jvp!r}")
        if fd_step is not None:
            positive("fd_step", fd_step)
        if low_memory and jvp != "forward":
            raise ValueError("low_memory is a way of jvp='forward': leave one of the two out.")
        self.jvp = jvp
        self.low_memory = low_memory
        # The Fisher matrix puts a product of gradients in the place of S.
        by_hessian = type(self)._output_product is GaussNewtonOperator._output_product
        if isinstance(self.loss, FunctionLoss) and by_hessian:
            self.loss.warn_if_linear(self.function, self.problem.data)
        self._convexity: tuple[object, bool] | None = None  # of parameters at one version
        self._records = Records()  # shared with all samples
        self.fd_step = fd_step if fd_step is not None else FD_STEP.get(self.dtype, 1e-2)

    @property
    def is_psd(self) -> bool:
        """Whether every S_n is positive semi-definite: so it is for the losses with closed forms.

        For others as declared (`FunctionLoss`), and else by the eigenvalues of S_n at the outputs of the data,
        found once for the parameters as they are: one forward, and C products with S of each example. False where
        one is negative, and where examples have more than 512 outputs.
        """
        known = self.loss.is_psd
        return self._convex_at_outputs() if known is None else known

    @property
    def way_out(self) -> str:
        """What to do where the loss is not convex in the outputs."""
        return (
            "The loss is not convex in the outputs, so G has negative directions: add damping larger than "
            "|lambda_min|, op + damping * identity for ConjugateGradient, influence(..., damping=...) without "
            "filtered=True (curvlab.spectrum.top_eigenvalues(-op) measures -lambda_min), or take "
            "FisherOperator(..., kind='empirical'). For a loss that is convex: FunctionLoss(loss, is_psd=True)."
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _convex_at_outputs(self) -> bool:
        key = tuple((p.data_ptr(), p._version) for p in self.function.live_parameters if not p.is_inference())
        if self._convexity is None or self._convexity[0] != key:
            outputs = (
                (self.problem.outputs(inputs, targets), targets) for inputs, targets in self.problem.batches
            )
            self._convexity = (key, all(self.loss.convex_at(h, y) for h, y in outputs))
        return self._convexity[1]

    def _activation_bytes(self, inputs: Inputs, targets: Tensor) -> tuple[float, float]:
        by_tokens = self._by_tokens(inputs, targets)
        found = activation_bytes(self.function, inputs, fused=self.low_memory, to_head=by_tokens)
        chunk = FEWER_LOGITS if self.low_memory else LOGITS_PER_CHUNK
        return found, 5.0 * chunk * self.dtype.itemsize if by_tokens else 0.0

    def _copies(self, columns: int) -> float:
        # Measured on the models of bench-speed: 0.9 to 2.4, 4.4 for 16 through vmap; 1.15 in two passes.
        return 1.3 if self.low_memory else 2.4 + columns / 4

    def _add_products(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None, rows: Tensor, sums: ColumnSums
    ) -> None:
        """Add JᵀSJ v for each row v of (K, P), with the J and S of one batch."""
        by_tokens = weights is None and self._by_tokens(inputs, targets)
        if not by_tokens and self._replayed(inputs, targets, weights, rows, sums):
            return
        size = len(rows) if self._together(inputs, len(rows), by_tokens=by_tokens) else 1
        step = self.fd_step if self.jvp == "finite_difference" else None
        way = linearise_by_tokens if by_tokens else linearise
        with forward_mode(
            f"op = {type(self).__name__}(model, loss, data, jvp='finite_difference') does without, and "
            "solvers take it, solve(op + damping * identity, b)"
        ):
            for start in range(0, len(rows), size):
                block = slice(start, start + size)
                given = (self.problem.function, inputs, targets, rows[block], sums[block])
                # h and J v, of all outputs or some tokens
                for part in way(*given, step=step, two_passes=self.low_memory):
                    self.problem.loss.check(part.outputs, part.targets)
                    curved = self._output_product(part.targets, part.outputs, part.tangents)  # S J v
                    if weights is not None:
                        curved = weighted(curved, weights, part.outputs)
                    part.pull_back(curved)  # JᵀS J v, added to the sums
                    del part, curved  # so that their memory is free while the next part is made

    def _replayed(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None, rows: Tensor, sums: ColumnSums
    ) -> bool:
        """Add the products of several small vectors as they were recorded; return whether there is a record."""
        if len(rows) == 1 or rows.numel() > MOST_NUMBERS_RECORDED or self.jvp != "forward" or self.low_memory:
            return False
        # A loss of one's own may read what changes: a weight that is annealed.
        if isinstance(self.loss, FunctionLoss) or not use_vmap(self.function, self.columns, inputs):
            return False

        def product(*given: Any) -> list[Tensor]:
            parameters, tangents, inputs, targets, weights = given
            outputs, derivatives, gradients = linearise_together(self.function, parameters, inputs, tangents)
            curved = self._output_product(targets, outputs, derivatives)
            return [outputs, *gradients(weighted(curved, weights, outputs))]

        check_mode(self.function.model)
        parameters = self.function.parameters
        given = (parameters, tuple(tangents_of(rows, parameters)), inputs, targets, weights)
        found = self._records.replay(module_state(self.function.model), product, *given)
        if found is None:
            return False
        outputs, *gradients = found
        check_finite(outputs)
        self.loss.check(outputs, targets)
        sums.add(gradients)
        return True

    def _output_product(self, targets: Tensor, outputs: Tensor, tangents: Tensor) -> Tensor:
        """Return S t for tangents t shaped as the outputs, or (K, *outputs.shape)."""
        return self.problem.loss.hessian_product(outputs, targets, tangents)

    def _together(self, inputs: Inputs, num_columns: int, *, by_tokens: bool) -> bool:
        """Return whether several vectors share a forward of the batch, as `columns` says."""
        if num_columns == 1 or self.jvp == "finite_difference" or self.low_memory:
            return False
        return self.columns != "loop" if by_tokens else use_vmap(self.function, self.columns, inputs)

    def _by_tokens(self, inputs: Inputs, targets: Tensor) -> bool:
        """Whether every token is a prediction of its own, made by a last linear layer."""
        return self.problem.loss.token_wise and targets.ndim == 2 and self.function.has_linear_head(inputs)
