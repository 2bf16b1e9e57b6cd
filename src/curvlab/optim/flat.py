"""Optimizers that treat all parameters as one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from curvlab.linalg import LinearOperator, flatten, unflatten

Closure = Callable[[], Tensor | float]


class DivergedError(ValueError, ArithmeticError):
    """A gradient became infinite or NaN; no step was taken."""


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that says what to pass where it gets no parameters."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        one = isinstance(params, nn.Module | Tensor | Mapping)
        given = [] if one else list(params)
        if not given:
            got = type(params).__name__ if one else "none"
            raise TypeError(
                f"params are several parameters, or groups of them, got {got}: pass model.parameters()"
            )
        super().__init__(given, defaults)  # type: ignore[arg-type]


class VectorOptimizer(CheckedOptimizer):
    """An optimizer with one group, and an operator of its size.

    Copies and pickles keep what `attributes` names, where torch's own keep settings and state alone.
    """

    attributes: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.attributes}

    def _group(self) -> dict[str, Any]:
        """Return the one parameter group: a curvature of all parameters has one setting."""
        if len(self.param_groups) != 1:
            raise ValueError(
                f"{type(self).__name__} preconditions all parameters together and takes one parameter group, got "
                f"{len(self.param_groups)}: pass model.parameters()."
            )
        return self.param_groups[0]

    def _parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._group()["params"] if parameter.requires_grad]

    def _check_size(self, operator: LinearOperator) -> None:
        """Refuse an operator of another size than the parameters that require gradients."""
        size = sum(parameter.numel() for parameter in self._parameters())
        if operator.shape[0] != size:
            raise ValueError(
                f"{type(self).__name__} got {size} parameters and a {type(operator).__name__} of size "
                f"{operator.shape[0]}: both must be the parameters that require gradients, in the same order."
            )

    def _gradient(self) -> Tensor:
        """Return the gradients as one vector, (n,); a missing one is zero, a non-finite one an error."""
        parameters, name = self._parameters(), type(self).__name__
        if all(parameter.grad is None for parameter in parameters):
            raise ValueError(
                f"{name}.step found no gradients: call loss.backward() first, or pass a closure that does."
            )
        gradient = flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters).detach()
        if not bool(gradient.isfinite().all()):
            raise DivergedError(
                f"{name}.step found NaN or infinity in the gradient: the iteration has diverged. Raise alpha (or "
                "sigma), or lower lr."
            )
        return gradient

    @torch.no_grad()
    def _move(self, displacement: Tensor) -> None:
        """Add a flat displacement, (n,), to the parameters; those without a gradient stay."""
        parameters = self._parameters()
        for parameter, part in zip(parameters, unflatten(displacement, parameters), strict=True):
            if parameter.grad is not None:
                parameter.add_(part)


def evaluate(closure: Closure | None) -> Tensor | float | None:
    """Return the closure's loss, detached, with gradients enabled inside; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return loss.detach() if isinstance(loss, Tensor) else loss
