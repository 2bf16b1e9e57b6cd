"""Muon as it is used: for the weight matrices inside a network, with Adam for all other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MuonWithAdam(torch.optim.Optimizer):
    """torch.optim.Muon on hidden weights, as matrices (out, rest); torch.optim.Adam on vectors and the last layer.

    Both take one learning rate: Muon's update is scaled to the root mean square of Adam's (its setting
    "match_rms_adamw"). No weight decay.

    Args:
        model: its parameters that require gradients; those with two or more axes are weights.
        lr: of both.
        momentum: of Muon (with Nesterov's step, its default), and Adam's first coefficient.
        decay: Adam's second coefficient.
    """

    def __init__(self, model: nn.Module, lr: float, *, momentum: float, decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = [parameter for parameter in trained if parameter.ndim > 1][:-1]
        if not weights:
            raise ValueError(
                "muon needs a network with a hidden layer: this one has no weights but the last layer's"
            )
        hidden = set(weights)
        others = [parameter for parameter in trained if parameter not in hidden]
        # Muon takes matrices only: views, so that what it changes is the convolution's own kernel.
        self._matrices = [(weight, weight.detach().flatten(1)) for weight in weights]
        super().__init__([{"params": weights, "lr": lr}, {"params": others, "lr": lr}], {})
        self._muon = torch.optim.Muon(
            [view for _, view in self._matrices],
            lr=lr,
            momentum=momentum,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adam = torch.optim.Adam(others, lr=lr, betas=(momentum, decay))

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Any = None
    ) -> None:
        """Take one step; a closure is not supported."""
        if closure is not None:
            raise ValueError("MuonWithAdam takes no closure: compute the gradients before step()")
        for weight, view in self._matrices:
            view.grad = None if weight.grad is None else weight.grad.flatten(1)
        for group, inner in zip(self.param_groups, (self._muon, self._adam), strict=True):
            inner.param_groups[0]["lr"] = group["lr"]
            inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both."""
        self._muon.load_state_dict(state_dict["muon"])
        self._adam.load_state_dict(state_dict["adam"])
        for group, inner in zip(self.param_groups, (self._muon, self._adam), strict=True):
            group["lr"] = inner.param_groups[0]["lr"]
