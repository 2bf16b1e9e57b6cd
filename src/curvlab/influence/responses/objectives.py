"""The objectives of Bae et al. (2022), Sec. C.2, estimated on one batch, for all groups at once.

Each is a function of the displacements u = θ - origin, (K, P), and of the indices of a batch's examples, (B,), and
returns K values and their gradients (K, P). Mean over B stands for mean over N. In displacements, because the
responses differ from θ^s in the last digits only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, jvp, vmap

from curvlab.influence.responses.left_out import LeftOut
from curvlab.linalg import flatten, unflatten
from curvlab.problem import ModelFunction, output_loss
from curvlab.training import weighted_gradient
from curvlab.training.ensemble import one_of, unstack

Values: TypeAlias = Sequence[Tensor]
Batch: TypeAlias = Any  # (inputs, targets), of all groups or of one

# A group of up to so many examples enters every step as a whole; of a larger one, those that are in the batch.
MAX_WHOLE_GROUP = 32


class _OfLeftOut:
    """What the objectives share: whom they are of."""

    left_out: LeftOut
    origin: Tensor

    @property
    def depends_on(self) -> dict[str, Any]:
        """What they are made of, as settings of a checkpoint."""
        return {"objective": type(self).__name__, "origin": self.origin, **self.left_out.settings}


class DownweightedCost(_OfLeftOut):
    """Q_k(θ) = 1/N sum_i w_ki l_i(θ) + l2/2 ‖θ‖²: Eq. 11 with ε = 1/N, of the cold and the warm optimum.

    Args:
        left_out: network, data, groups.
        origin: (P,), where u = 0 is; None: θ^s.
    """

    def __init__(self, left_out: LeftOut, origin: Tensor | None = None) -> None:
        self.left_out = left_out
        self.origin = left_out.base if origin is None else origin.to(left_out.base)
        self._gradient = weighted_gradient(left_out.losses, left_out.weights)

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        positions = self.origin + displacement
        values, gradients = self._gradient(positions, indices)
        return _with_square(values, gradients, self.left_out.l2, positions)


class ProximalCost(DownweightedCost):
    """Q_k(θ) + λ/2 ‖θ - θ^s‖²: Eq. 7 (Eq. 21), of the proximal warm optimum."""

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        values, gradients = super().__call__(displacement, indices)
        return _with_square(
            values, gradients, self.left_out.damping, displacement + self.origin - self.left_out.base
        )


class ProximalBregmanCost(_OfLeftOut):
    """1/N sum_i D_i(h_i(θ), h_i(θ^s)) + sum_i (w_ki - 1)/N l_i(θ) + (λ + l2)/2 ‖θ - θ^s‖²: Eq. 8 (Eq. 28, 30).

    D is the Bregman divergence of the loss in the outputs, Eq. 29. Eq. 30 prints the norm of the proximity term
    without its square, as Eq. 28 and all that follows have it. For a single z the second term is -1/N l(z).

    Of an example that is left out, divergence and loss together are -l_i(θ^s) - ∇l_iᵀ(h_i - h_i(θ^s)) over N,
    linear in its outputs: where these grow faster than ‖θ - θ^s‖², as those of three layers and more do, the
    sum is not bounded below. The minimum that the paper means is the one near θ^s, which small ε have; for 1/N
    and small λ it may not exist (L-BFGS runs away on fitted MLPs), and K/2 epochs of SGD end on the way.

    `curvlab.influence.ProximalBregmanObjective` is the same for single points, scaled by ε so that it may be as
    small as 1e-8, and with the full-batch gradients that Newton's method needs.
    """

    def __init__(self, left_out: LeftOut) -> None:
        self.left_out, self.origin = left_out, left_out.base
        self.function = ModelFunction(left_out.losses.model)
        self.loss = output_loss(left_out.loss)
        self.base = tuple(unflatten(left_out.base, self.function.parameters))
        self._count = sum(self.loss.count(targets) for targets in left_out.train[1].split(4096))
        self._count /= left_out.num_examples  # predictions of an example
        self._whole = _padded(left_out.groups) if max(map(len, left_out.groups)) <= MAX_WHOLE_GROUP else None

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        batch = self.left_out.losses.batch(indices)
        values, gradients = self._each(self._divergence, displacement, batch, None, shared=True)
        if self._whole is not None:
            members, kept = self._whole
            own = self.left_out.losses.batch(members.to(displacement.device))
            weights = -kept.to(displacement) / self.left_out.num_examples
            more = self._each(self._own_losses, displacement, own, weights, shared=False)
        else:
            weights = (self.left_out.weights[:, indices] - 1) / len(indices)
            more = self._each(self._own_losses, displacement, batch, weights, shared=True)
        strength = self.left_out.damping + self.left_out.l2
        return _with_square(values + more[0], gradients + more[1], strength, displacement)

    def _divergence(self, step: Values, batch: Batch, weights: None) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            reference = self.function(self.base, inputs)
        outputs = self.function(_moved(self.base, step), inputs)
        divergence = self.loss.bregman_divergence(outputs, reference, targets).sum()
        return divergence / (len(targets) * self._count)

    def _own_losses(self, step: Values, batch: Batch, weights: Tensor) -> Tensor:
        inputs, targets = batch
        outputs = self.function(_moved(self.base, step), inputs)
        return self.loss.per_example(outputs, targets) @ weights / self._count

    def _each(
        self,
        value: Callable[..., Tensor],
        displacement: Tensor,
        batch: Batch,
        weights: Tensor | None,
        *,
        shared: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return value and gradient of one function for each group: by vmap or in a loop, what is faster."""
        num_inputs = batch[0].numel() if shared else batch[0][0].numel()
        if self.left_out.losses.vmap_pays(len(displacement), num_inputs):
            axes = (0, None if shared else 0, None if weights is None else 0)
            steps = tuple(unstack(displacement, self.base))
            pieces, values = vmap(grad_and_value(value), in_dims=axes)(steps, batch, weights)
            return values, torch.cat([piece.flatten(1) for piece in pieces], dim=1)
        values, gradients = torch.zeros_like(displacement[:, 0]), torch.zeros_like(displacement)
        for k, own in enumerate(displacement):
            leaves = [leaf.detach().requires_grad_() for leaf in unflatten(own, self.base)]
            found = value(leaves, batch if shared else one_of(batch, k), None if weights is None else weights[k])
            values[k] = found.detach()
            gradients[k] = flatten(torch.autograd.grad(found, leaves, materialize_grads=True))
        return values, gradients


class LinearisedProximalBregmanCost(ProximalBregmanCost):
    """The same with h linear in θ and the loss quadratic in h, both at θ^s: Eq. 10 (Eq. 38).

    1/N sum_i ½ (J_i u)ᵀ S_i (J_i u) + sum_i (w_ki - 1)/N ∇l_iᵀ u + (λ + l2)/2 ‖u‖², u = θ - θ^s, J_i u by
    forward-mode differentiation (Eq. 40), S_i = ∇²_h l_i. The ½ is missing in Eq. 39 and Eq. 44; without it the
    minimiser would be that of 2 G, and Eq. 45 and 46 would not follow. Its gradient is
    (G + λ + l2) u + sum_i (w_ki - 1)/N ∇l_i, its minimiser the influence estimate.
    """

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        batch = self.left_out.losses.batch(indices)
        values, gradients = self._each(self._quadratic, displacement, batch, None, shared=True)
        pull = self.left_out.pull
        strength = self.left_out.damping + self.left_out.l2
        return _with_square(values + (pull * displacement).sum(1), gradients + pull, strength, displacement)

    def _quadratic(self, step: Values, batch: Batch, weights: None) -> Tensor:
        inputs, targets = batch

        def outputs(values: Values) -> Tensor:
            return self.function(values, inputs)

        reference, change = jvp(outputs, (self.base,), (tuple(step),))[:2]  # h_i(θ^s), J_i u
        curved = self.loss.hessian_product(reference.detach(), targets, change)  # S_i J_i u
        return 0.5 * (change * curved).sum() / (len(targets) * self._count)


def _with_square(values: Tensor, gradients: Tensor, strength: float, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Add strength/2 ‖v‖² and its gradient."""
    if strength == 0:
        return values, gradients
    return values + 0.5 * strength * vectors.square().sum(1), gradients + strength * vectors


def _moved(base: Values, step: Values) -> list[Tensor]:
    return [value + own for value, own in zip(base, step, strict=True)]


def _padded(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return groups as (K, m) indices, the shorter ones filled up, and what of them is no filling."""
    longest = max(1, *map(len, groups))
    members = torch.zeros(len(groups), longest, dtype=torch.long)
    kept = torch.zeros(len(groups), longest, dtype=torch.bool)
    for k, group in enumerate(groups):
        members[k, : len(group)], kept[k, : len(group)] = group, True
    return members, kept
