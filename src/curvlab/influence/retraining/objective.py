"""The objectives of Bae et al. (2022), Sec. C.2, estimated on one batch, for all groups that are left out at once.

Each is a function of the displacements u = θ - origin, (K, P), and of the indices of a batch's examples, (B,), and
returns K values and their gradients (K, P). Mean over B stands for mean over N. In displacements, because the
responses differ from θ^s in the last digits only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp

from curvlab.arguments import not_negative, positive
from curvlab.linalg import flatten, unflatten
from curvlab.problem import Data, Loss, ModelFunction, Problem
from curvlab.problem.records import Records
from curvlab.training import EnsembleLosses, weighted_gradient
from curvlab.training.ensemble import each_copy

Values: TypeAlias = Sequence[Tensor]
Batch: TypeAlias = Any  # (inputs, targets), of all groups or of one

# A group of up to so many examples enters every step as a whole; of a larger one, those that are in the batch.
MAX_WHOLE_GROUP = 32


@dataclass(frozen=True)
class LeftOut:
    """K groups of training examples, each left out of the training of one network, one group at a time.

    Conventions of Bae et al. (2022) beside ours. Their cost with an example down-weighted is Q = J - ε l(z), and
    leaving z out is ε = 1/N; our ε up-weights, J + ε l(z), so that leaving out is ε = -1/N. Both are written as
    weights here, J_k = 1/N sum_i w_ki l_i with w_ki = 1, and 0 for what is left out: the sum is divided by N in
    any case. Responses are displacements from θ^s, the parameters of the network.

    An L2 term l2/2 ‖θ‖² belongs to the cost. Its own Bregman divergence is l2/2 ‖θ - θ^s‖², so that in Eq. 8 and
    Eq. 10 of the paper it adds to the damping, and the curvature of the influence estimate is G + (λ + l2) I.

    Attributes:
        model: in eval mode, at θ^s; neither dropout nor BatchNorm may be in it, whose outputs depend on chance or
            on the batch. Its dtype is that of all that is computed: float64 where differences are small. Or a
            `Problem` without weights in the place of model, loss and train.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, a mean over examples.
        train: N examples of one shape, in any form that `Batches` takes.
        groups: K vectors of indices; an empty one leaves nothing out.
        damping: λ of the proximity term.
        l2: of the cost.
    """

    model: nn.Module | Problem
    loss: Loss | None = None
    train: Data | None = None
    groups: Sequence[Tensor] = ()
    damping: float = field(kw_only=True)
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.problem.weights is not None:
            raise ValueError("what is left out has weight 0 and all else 1: pass a problem without weights")
        positive("damping", self.damping, "it is the weight of the proximity term")
        not_negative("l2", self.l2)
        for group in self.groups:
            if not isinstance(group, Tensor) or group.is_floating_point():
                raise TypeError(f"a group is a tensor of indices, got {group!r}: torch.tensor([3, 5])")
            if group.ndim != 1 or (
                len(group) and not 0 <= int(group.min()) <= int(group.max()) < self.num_examples
            ):
                raise ValueError(
                    f"a group is a vector of indices from 0 to {self.num_examples - 1}, got shape "
                    f"{tuple(group.shape)} with values up to {int(group.max()) if len(group) else None}"
                )

    @property
    def num_examples(self) -> int:
        """N."""
        return self.losses.num_examples

    @property
    def strength(self) -> float:
        """λ + l2, the weight of ‖θ - θ^s‖²/2 in Eq. 8 and Eq. 10."""
        return self.damping + self.l2

    @cached_property
    def problem(self) -> Problem:
        """The three, opened."""
        return Problem.of(self.model, self.loss, self.train)

    @cached_property
    def losses(self) -> EnsembleLosses:
        """The losses of single examples."""
        return EnsembleLosses(self.problem)

    @cached_property
    def base(self) -> Tensor:
        """θ^s, (P,)."""
        return flatten(self.problem.parameters)

    @property
    def zeros(self) -> Tensor:
        """Displacements 0, (K, P)."""
        return self.base.new_zeros(len(self.groups), len(self.base))

    @cached_property
    def weights(self) -> Tensor:
        """w, (K, N)."""
        weights = torch.ones(len(self.groups), self.num_examples)
        for row, group in zip(weights, self.groups, strict=True):
            row[group] = 0.0
        return weights.to(self.base)

    @cached_property
    def pull(self) -> Tensor:
        """Gradients of sum_i (w_ki - 1)/N l_i at θ^s, (K, P): -1/N ∇l(z) for a single example z."""
        touched = (self.weights != 1).any(0).nonzero().flatten()
        pull, gradient = self.zeros, weighted_gradient(self.losses, self.weights - 1)
        for indices in touched.split(256):  # a mean over the chunk, so back to a sum over N
            pull += gradient(self.base.expand_as(pull), indices)[1] * (len(indices) / self.num_examples)
        return pull


class DownweightedCost:
    """Q_k(θ) = 1/N sum_i w_ki l_i(θ) + l2/2 ‖θ‖²: Eq. 11 with ε = 1/N, of the cold and the warm optimum.

    Args:
        left_out: network, data, groups.
        origin: (P,), where u = 0 is; None: θ^s.
    """

    def __init__(self, left_out: LeftOut, origin: Tensor | None = None) -> None:
        self.left_out = left_out
        self.origin = left_out.base if origin is None else origin.to(left_out.base)

    @property
    def depends_on(self) -> dict[str, Any]:
        """What it is made of, as settings of a checkpoint."""
        left_out, problem = self.left_out, self.left_out.problem
        own = {"model": problem.model, "loss": problem.given_loss, "train": problem.data}
        own |= {name: getattr(left_out, name) for name in ("groups", "damping", "l2")}
        return {"objective": type(self).__name__, "origin": self.origin, **own}

    @cached_property
    def _gradient(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return weighted_gradient(self.left_out.losses, self.left_out.weights)

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        positions = self.origin + displacement
        return _with_square(*self._gradient(positions, indices), self.left_out.l2, positions)


class ProximalCost(DownweightedCost):
    """Q_k(θ) + λ/2 ‖θ - θ^s‖²: Eq. 7 (Eq. 21), of the proximal warm optimum."""

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        away = displacement + self.origin - self.left_out.base
        return _with_square(*super().__call__(displacement, indices), self.left_out.damping, away)


class ProximalBregmanCost(DownweightedCost):
    """1/N sum_i D_i(h_i(θ), h_i(θ^s)) + sum_i (w_ki - 1)/N l_i(θ) + (λ + l2)/2 ‖θ - θ^s‖²: Eq. 8 (Eq. 28, 30).

    D is the Bregman divergence of the loss in the outputs, Eq. 29. Eq. 30 prints the norm of the proximity term
    without its square, as Eq. 28 and all that follows have it. For a single z the second term is -1/N l(z).

    Of an example that is left out, divergence and loss together are -l_i(θ^s) - ∇l_iᵀ(h_i - h_i(θ^s)) over N,
    linear in its outputs: where these grow faster than ‖θ - θ^s‖², as those of three layers and more do, the
    sum is not bounded below. The minimum that the paper means is the one near θ^s, which small ε have; for 1/N
    and small λ it may not exist (L-BFGS runs away on fitted MLPs), and K/2 epochs of SGD end on the way.

    `ProximalBregmanObjective` is the same for single points, scaled by ε so that it may be as small as 1e-8, with
    gradients formed from differences of ∇l, which values of D would round away.
    """

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__(left_out)
        self.function = ModelFunction(left_out.losses.model)
        self.loss = left_out.problem.loss
        self.base = tuple(unflatten(left_out.base, self.function.parameters))
        self._records = Records()
        self._count = left_out.problem.total_count / left_out.num_examples  # predictions of an example
        self._whole = _padded(left_out.groups) if max(map(len, left_out.groups)) <= MAX_WHOLE_GROUP else None

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        left_out = self.left_out
        batch = left_out.losses.batch(indices)
        values, gradients = self._each(self._divergence, displacement, batch)
        if self._whole is not None:
            members, kept = self._whole
            own = left_out.losses.batch(members.to(displacement.device))
            weights = -kept.to(displacement) / left_out.num_examples
            more = self._each(self._own_losses, displacement, own, weights, shared=False)
        else:
            weights = (left_out.weights[:, indices] - 1) / len(indices)
            more = self._each(self._own_losses, displacement, batch, weights)
        return _with_square(values + more[0], gradients + more[1], left_out.strength, displacement)

    def _divergence(self, step: Values, batch: Batch, weights: None) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            reference = self.function(self.base, inputs)
        divergence = self.loss.bregman_divergence(self._outputs(step, inputs), reference, targets).sum()
        return divergence / (len(targets) * self._count)

    def _own_losses(self, step: Values, batch: Batch, weights: Tensor) -> Tensor:
        inputs, targets = batch
        return self.loss.per_example(self._outputs(step, inputs), targets) @ weights / self._count

    def _outputs(self, step: Values, inputs: Tensor) -> Tensor:
        return self.function([value + own for value, own in zip(self.base, step, strict=True)], inputs)

    def _each(
        self,
        value: Callable[..., Tensor],
        displacement: Tensor,
        batch: Batch,
        weights: Tensor | None = None,
        *,
        shared: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return value and gradient of one function for each group: by vmap or in a loop, what is faster."""
        inputs = [batch[0]] if isinstance(batch[0], Tensor) else batch[0].values()
        num_inputs = sum(part.numel() if shared else part[0].numel() for part in inputs)
        by_vmap = self.left_out.losses.vmap_pays(len(displacement), num_inputs)
        values, gradients = each_copy(
            value,
            displacement,
            self.base,
            batch,
            shared=shared,
            weights=weights,
            by_vmap=by_vmap,
            records=self._records,
        )
        return values, torch.cat([piece.flatten(1) for piece in gradients], dim=1)


class LinearisedProximalBregmanCost(ProximalBregmanCost):
    """The same with h linear in θ and the loss quadratic in h, both at θ^s: Eq. 10 (Eq. 38).

    1/N sum_i ½ (J_i u)ᵀ S_i (J_i u) + sum_i (w_ki - 1)/N ∇l_iᵀ u + (λ + l2)/2 ‖u‖², u = θ - θ^s, J_i u by
    forward-mode differentiation (Eq. 40), S_i = ∇²_h l_i. The ½ is missing in Eq. 39 and Eq. 44; without it the
    minimiser would be that of 2 G, and Eq. 45 and 46 would not follow. Its gradient is
    (G + λ + l2) u + sum_i (w_ki - 1)/N ∇l_i, its minimiser the influence estimate.
    """

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (K,) and gradients (K, P)."""
        values, gradients = self._each(self._quadratic, displacement, self.left_out.losses.batch(indices))
        pull = self.left_out.pull
        values, gradients = values + (pull * displacement).sum(1), gradients + pull
        return _with_square(values, gradients, self.left_out.strength, displacement)

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


def _padded(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return groups as (K, m) indices, the shorter ones filled up, and what of them is no filling."""
    longest = max(1, *map(len, groups))
    members = torch.zeros(len(groups), longest, dtype=torch.long)
    kept = torch.zeros(len(groups), longest, dtype=torch.bool)
    for k, group in enumerate(groups):
        members[k, : len(group)], kept[k, : len(group)] = group, True
    return members, kept
