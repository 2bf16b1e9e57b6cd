"""Fisher matrices: exact, Monte-Carlo and empirical."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.linearise import Columns
from curvlab.problem import Data, FunctionLoss, Loss, Problem
from curvlab.seeding import Seed, generator_of


class FisherOperator(GaussNewtonOperator):
    """Mean Fisher matrix F = 1/n sum_n J_nᵀ E[r_n r_nᵀ] J_n, r_n the loss's gradient by the outputs.

    kind="exact": the expectation over the model's own labels, in closed form. For the supported losses, which
    are -log p of an exponential family in its natural parameter, it equals the Gauss-Newton matrix.
    kind="monte_carlo": one label for each example (each token, for language models), drawn from the model at
    construction and kept, so the operator is linear and deterministic; unbiased for the exact matrix.
    nn.MSELoss is read as the Gaussian with p ∝ exp(-(h - y)²); a mean over C outputs scales the matrix by
    1/C, as it does the loss.
    kind="empirical": the data's own labels, 1/n sum_n g_n g_nᵀ with g_n the gradient of example n's loss
    (token n's, for language models). It is no approximation of the Hessian where the loss is small.

    With class weights a prediction counts as often as the weight of its given label says, in all three kinds:
    labels are drawn from the unweighted model. For losses of one's own "exact" is not defined, "monte_carlo"
    only where `FunctionLoss` is told how targets are drawn: a function does not say which distribution's -log p it
    is.

    Args beside those of GaussNewtonOperator:
        kind: which expectation, see above.
        generator: draws the labels of kind="monte_carlo"; required for it.

    Symmetric, positive semi-definite, (P, P). Cost: as GaussNewtonOperator; "monte_carlo" one forward
    more, once.
    """

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        data: Data | None = None,
        *,
        kind: Literal["exact", "monte_carlo", "empirical"] = "exact",
        generator: Seed = None,
        jvp: Literal["forward", "finite_difference"] = "forward",
        fd_step: float | None = None,
        low_memory: bool = False,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        columns: Columns = "auto",
    ) -> None:
        super().__init__(
            model,
            loss,
            data,
            jvp=jvp,
            fd_step=fd_step,
            low_memory=low_memory,
            batch_size=batch_size,
            memory_budget=memory_budget,
            columns=columns,
        )
        if kind not in ("exact", "monte_carlo", "empirical"):
            raise ValueError(f"kind must be 'exact', 'monte_carlo' or 'empirical', got {kind!r}")
        self.kind = kind
        if isinstance(self.loss, FunctionLoss) and kind == "exact":
            raise TypeError(
                "the exact Fisher matrix has a closed form only for nn.CrossEntropyLoss, nn.MSELoss and "
                "nn.BCEWithLogitsLoss: use GaussNewtonOperator (equal to it where the loss is -log p of an "
                "exponential family in its natural parameter), kind='empirical', or kind='monte_carlo' with "
                "FunctionLoss(loss, sample_targets=...)."
            )
        if kind == "monte_carlo":
            if generator is None:
                raise ValueError(
                    "kind='monte_carlo' draws labels: pass generator=torch.Generator().manual_seed(0), or a seed"
                )
            generator, drawn = generator_of(generator), list[Tensor]()
            read = self.problem.of_every_example().map(lambda x, y, _: (self.problem.outputs(x, y), y))
            for outputs, targets in read:
                drawn.extend(self.loss.sample_targets(outputs, targets, generator).unbind(0))
            self.problem = self.problem.with_targets(drawn, self.loss.for_sampled_targets())

    @property
    def is_psd(self) -> bool:
        """True: a mean of outer products."""
        return True

    def _output_product(self, targets: Tensor, outputs: Tensor, tangents: Tensor) -> Tensor:
        if self.kind == "exact":
            return super()._output_product(targets, outputs, tangents)
        if self.kind == "monte_carlo":
            return self.loss.outer_product(self.loss.sampled_gradient(outputs, targets), tangents)
        return self.loss.outer_product(self.loss.example_gradient(outputs, targets), tangents)
