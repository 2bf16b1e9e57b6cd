"""What is left out of the training set, of which network: all that the response functions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.linalg import flatten
from curvlab.problem import ModelFunction
from curvlab.training import EnsembleLosses, weighted_gradient


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
            on the batch. Its dtype is that of all that is computed: float64 where differences are small.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, a mean over examples.
        train: (inputs, targets), N examples.
        groups: K vectors of indices; an empty one leaves nothing out.
        damping: λ of the proximity term.
        l2: of the cost.
    """

    model: nn.Module
    loss: nn.Module
    train: tuple[Tensor, Tensor]
    groups: Sequence[Tensor]
    damping: float
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise ValueError(
                f"damping must be positive, got {self.damping}: it is the weight of the proximity term"
            )
        if self.l2 < 0:
            raise ValueError(f"l2 must not be negative, got {self.l2}")
        for group in self.groups:
            if group.ndim != 1 or (
                len(group) and not 0 <= int(group.min()) <= int(group.max()) < self.num_examples
            ):
                raise ValueError(
                    f"a group is a vector of indices from 0 to {self.num_examples - 1}, got shape "
                    f"{tuple(group.shape)} with values up to {int(group.max()) if len(group) else None}"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """All of it, by name, for checkpoints."""
        return {
            "model": self.model,
            "train": self.train,
            "groups": list(self.groups),
            "loss": self.loss,
            "damping": self.damping,
            "l2": self.l2,
        }

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.train[1])

    @cached_property
    def losses(self) -> EnsembleLosses:
        """The losses of single examples."""
        return EnsembleLosses(self.model, self.loss, self.train)

    @cached_property
    def base(self) -> Tensor:
        """θ^s, (P,)."""
        return flatten(ModelFunction(self.model).parameters)

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
        pull = torch.zeros(len(self.groups), len(self.base), dtype=self.base.dtype, device=self.base.device)
        gradient = weighted_gradient(self.losses, self.weights - 1)
        for indices in touched.split(256):  # a mean over the chunk, so back to a sum over N
            pull += gradient(self.base.expand_as(pull), indices)[1] * (len(indices) / self.num_examples)
        return pull
