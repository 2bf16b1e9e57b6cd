"""Losses as functions of the model's outputs: sums, gradients, Hessians S, and factors of these.

Everything here is a sum over predictions, without the loss's own averaging: the operators divide once, by the
count over the whole data, so that batches of any sizes give the same matrix. Closed forms stand in
closed_forms.py, functions of a user's own in own_losses.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

# More outputs of an example than this are not held as (C, C) matrices.
MAX_OUTPUTS = 512
# Entries of matrices held at once.
_MATRIX_NUMBERS = 2**24


class OutputLoss(ABC):
    """sum_n l(h_n, y_n) with its derivatives in h; S_n = ∇²l_n, over all outputs of an example.

    Attributes:
        reduction: "mean" or "sum", as the PyTorch loss had it.
        token_wise: whether classes come last, and every place before them is a prediction of its own.
        by_vmap: whether it can be mapped over examples and parameters.
        twice_backward: whether forward mode may not exist for its derivatives, which autograd takes.
    """

    token_wise = False
    by_vmap = True
    twice_backward = False

    def __init__(self, loss: nn.Module) -> None:
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction='{reduction}' has no curvature matrix: use 'mean' or 'sum'")
        self.reduction = reduction

    @property
    def is_psd(self) -> bool | None:
        """Whether S is positive semi-definite for all outputs; None where that is not known."""
        return True

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless targets fit the outputs."""

    # ------------------------------------------------------------------------------------- sums
    @abstractmethod
    def counts(self, targets: Tensor) -> Tensor:
        """Return the number of predictions of each example, (N,): what a mean over it divides by."""

    def count(self, targets: Tensor) -> float:
        """Return by how much a mean divides the sum over these targets."""
        return float(self.counts(targets).sum())

    @abstractmethod
    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of each example, (N,)."""

    @abstractmethod
    def total(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum over all examples, (), each times its weight, (N,)."""

    def own_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what the PyTorch loss gives for each example alone, (N,): a mean over its own predictions."""
        losses = self.per_example(outputs, targets)
        return losses if self.reduction == "sum" else losses / self.counts(targets).clamp(min=1).to(losses)

    def normalised(self, targets: Iterable[Tensor]) -> OutputLoss:
        """Return an equal loss with class weights whose mean over all these targets is one; others as they are.

        A mean over them all does not change. The loss of a single example is then its term of that mean, as it is
        without class weights: influence, whose unit is a weight added to that term, needs it so.
        """
        return self

    def bregman_divergence(self, outputs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
        """Return l(h) - l(h') - (h - h')ᵀ∇l(h') summed over an example's predictions, (N,).

        The D of Klochkov & Liu (2024), Eq. 5. For cross-entropy it does not depend on the labels. It cancels to
        rounding where h - h' is below 1e-8: optimise by its gradient, ∇l(h) - ∇l(h').
        """
        linear = ((outputs - reference) * self.gradient(reference, targets)).flatten(1).sum(1)
        return self.per_example(outputs, targets) - self.per_example(reference, targets) - linear

    # ------------------------------------------------------------------------------- derivatives
    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of the sum by the outputs, shaped like them."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, targets: Tensor, tangents: Tensor) -> Tensor:
        """Return S t for each prediction. Cost: linear in the outputs.

        t is shaped as the outputs, or (K, *outputs.shape) for K tangents at once.
        """

    def dense_hessians(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return S_n, (N, C, C), C all outputs of an example. Cost: C products with S."""
        size = outputs[0].numel()
        if size > MAX_OUTPUTS:
            raise ValueError(
                f"an example has {size} outputs: their Hessian is no matrix to hold ({MAX_OUTPUTS} at most)"
            )
        units = torch.eye(size).to(outputs).reshape(size, 1, *outputs.shape[1:]).expand(-1, *outputs.shape)
        return self.hessian_product(outputs, targets, units).reshape(size, len(outputs), size).transpose(0, 1)

    def convex_at(self, outputs: Tensor, targets: Tensor) -> bool:
        """Return whether no S_n has a negative eigenvalue beyond rounding at these outputs; False for a large C.

        Beyond rounding: below -100 ε of the largest in the batch, ε of the dtype.
        """
        size = outputs[0].numel()
        if size > MAX_OUTPUTS:
            return False
        rows = max(1, _MATRIX_NUMBERS // size**2)
        outputs, targets = at_least_single(outputs, targets)
        parts = zip(outputs.split(rows), targets.split(rows), strict=True)
        return _none_negative(torch.cat([torch.linalg.eigvalsh(self.dense_hessians(h, y)) for h, y in parts]))

    def hessian_traces(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return tr(S) of each example, summed over its predictions, (N,)."""
        return self.dense_hessians(outputs, targets).diagonal(dim1=1, dim2=2).sum(1)

    def hessian_factors(self, outputs: Tensor, targets: Tensor, *, limit: int | None = None) -> Tensor:
        """Return columns l_r with S = sum_r l_r l_rᵀ, (R, *outputs.shape), R the outputs of an example.

        With a limit below R each example keeps its longest columns, so that the sum stays below S. In general
        l_r = sqrt(μ_r) v_r with eigenvalues and eigenvectors of S, the largest first.
        """
        values, vectors = torch.linalg.eigh(self.dense_hessians(*at_least_single(outputs, targets)))
        if not _none_negative(values):
            raise ValueError(
                f"S is not positive semi-definite at these outputs (eigenvalue {float(values.min()):.3g}): it has "
                "no square root. The loss is not convex in the outputs."
            )
        columns = (vectors * values.clamp(min=0).sqrt()[:, None]).flip(-1).to(outputs)
        return columns.permute(2, 0, 1).reshape(-1, *outputs.shape)[:limit]

    def random_factor(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Return random r with E r = 0 and E r rᵀ = S, shaped as the outputs, independent for each prediction."""
        columns = self.hessian_factors(outputs, targets)
        signs = random_signs(columns.shape[:2], generator).to(outputs)
        return (columns * signs.reshape(*signs.shape, *[1] * (outputs.ndim - 1))).sum(0)

    # ----------------------------------------------------------------------- the model's own labels
    @abstractmethod
    def sample_targets(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets from the model's own distribution p ∝ exp(-l).

        Read them by `for_sampled_targets()`: drawn targets mark ignored predictions in their own way, and where
        labels have weights they stand beside the given ones, (*targets.shape, 2).
        """

    def sampled_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of -log p by the outputs for drawn targets; zero where they are ignored."""
        return self.gradient(outputs, targets)

    def for_sampled_targets(self) -> Self:
        """Return this loss as it reads targets drawn by `sample_targets`."""
        return self

    def outer_product(self, gradients: Tensor, tangents: Tensor) -> Tensor:
        """Return r (rᵀt) example by example, with all outputs of an example in one vector; t as above."""
        products = gradients * tangents
        axes = tuple(range(1 - gradients.ndim, 0))  # all but the examples'; none of them would mean all in `sum`
        return gradients * (products.sum(axes, keepdim=True) if axes else products)

    def example_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return r of which r rᵀ, divided by `count`, is the outer product of an example's gradient."""
        return self.gradient(outputs, targets)


def random_signs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return independent signs, 1 and -1, as integers where the generator is."""
    return 2 * torch.randint(2, shape, generator=generator, device=generator.device) - 1


def at_least_single(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float32 where the outputs are of half precision, in which nothing has eigenvalues."""
    if outputs.dtype in (torch.float32, torch.float64):
        return outputs, targets
    return outputs.float(), targets.float() if targets.is_floating_point() else targets


def _none_negative(values: Tensor) -> bool:
    return float(values.min()) >= -100 * torch.finfo(values.dtype).eps * float(values.abs().max())
