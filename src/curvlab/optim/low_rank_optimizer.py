"""What optimizers share that precondition by a multiple of the identity plus a matrix of low rank."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.flat import Closure, evaluate
from curvlab.optim.parameter_block import ParameterBlock, Pieces, norm

Scope = Literal["global", "group", "tensor"]

_SHARED = ("rank", "decay", "damping", "scope", "as_coded")  # what a matrix of several groups needs in common
_ON_HOST = ("core", "gram")  # (rank, rank) in double precision: kept in main memory


class LowRankOptimizer(torch.optim.Optimizer):
    """w <- w - lr · clip(G⁻¹ m), with G⁻¹ = scale (I - Bᵀ A B), B (rank, P) and A (rank, rank).

    G belongs to all parameters of a `ParameterBlock`; m is the gradient, averaged where there is momentum.
    A subclass says how B follows the sampled gradients (`_measure`, `_update_block`) and what A and scale are
    (`_inverse`).
    """

    momentum_is_average: bool  # m <- μ m + (1-μ) g, corrected for its start from zero; or else m <- μ m + g

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._inverses: dict[Tensor, tuple[Any, float, Tensor]] = {}
        super().__init__(params, defaults)

    # Settings and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it has any."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
            self._blocks()
        except (ValueError, TypeError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inverses = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; unlike in other optimizers, it keeps its precision whatever that of the parameters."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    device = torch.device("cpu") if name in _ON_HOST else parameter.device
                    self.state[parameter][name] = value.to(device, copy=True)
        self._inverses = {}

    # Curvature

    @torch.no_grad()
    def update_curvature(self) -> None:
        """Bring p.grad, the gradient for labels that the model has drawn (`sampled_label_loss`), into G.

        A parameter without gradient counts as zeros. Gradients that are not finite change nothing, and warn.
        Cost: see the class; one wait for the device.
        """
        measured = []
        for block in self._blocks():
            pieces = block.gradients()
            if pieces:
                block.add_missing_rows(pieces)
                measured.append((block, *self._measure(block, pieces)))
        if not measured:
            return
        # Everything that the host must know, in one transfer.
        device = measured[0][2].device
        numbers = torch.cat([numbers.to(device) for _, _, numbers in measured]).cpu()
        if not bool(numbers.isfinite().all()):
            self._warn("the sampled gradient", "left the curvature as it was")
            return
        sizes = [len(numbers) for _, _, numbers in measured]
        for (block, pieces, _), own in zip(measured, numbers.split(sizes), strict=True):
            self._update_block(block, pieces, own)
            self._inverses.pop(block.parameters[0], None)

    @torch.no_grad()
    def inverse_product(self, vector: Tensor) -> Tensor:
        """Return G⁻¹ v, (P,) -> (P,), for all parameters that require gradients, in the order of the groups.

        Without momentum, clipping and lr. Cost: that of a step.
        """
        blocks = [[p for p in block.parameters if p.requires_grad] for block in self._blocks()]
        in_order = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        sizes = [parameter.numel() for parameter in in_order]
        if vector.shape != (sum(sizes),):
            raise ValueError(f"inverse_product takes a vector of {sum(sizes)} numbers, got {tuple(vector.shape)}")
        given = dict(zip(in_order, vector.split(sizes), strict=True))
        result: Pieces = {}
        for block, members in zip(self._blocks(), blocks, strict=True):
            result |= self._directions(block, {p: given[p].to(block.dtype) for p in members})
        return torch.cat([result[parameter].to(vector) for parameter in in_order])

    # Steps

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step along p.grad, the gradient of the loss; return the closure's loss.

        A parameter without gradient stays where it is. Gradients that are not finite change nothing, and warn.
        """
        loss = evaluate(closure)
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        with_gradients = [(block, pieces) for block in self._blocks() if (pieces := block.gradients())]
        if not with_gradients:
            return loss
        device = next(iter(with_gradients[0][1])).device
        norms = torch.stack([norm(pieces).to(device) for _, pieces in with_gradients]).cpu()  # the one wait
        scales = [self._scale(block) for block, _ in with_gradients]
        limits = [torch.finfo(block.dtype).max for block, _ in with_gradients]
        if not all(bool(n * max(s, 1.0) < m) for n, s, m in zip(norms, scales, limits, strict=True)):
            self._warn("the gradient", "took no step")
            return loss
        for block, pieces in with_gradients:
            averaged = {p: self._with_momentum(p, piece, groups[p]) for p, piece in pieces.items()}
            for parameter, direction in self._directions(block, averaged).items():
                settings = groups[parameter]
                if settings["clip"] is not None:
                    direction.clamp_(-settings["clip"], settings["clip"])
                parameter.sub_(settings["lr"] * direction.view_as(parameter))
        return loss

    def _with_momentum(self, parameter: Tensor, piece: Tensor, settings: dict[str, Any]) -> Tensor:
        """Return m, (numel,); `piece` is the gradient's own memory, and is left alone."""
        if settings["maximize"]:
            piece = -piece
        if settings["weight_decay"]:
            piece = piece.add(parameter.reshape(-1).to(piece.dtype), alpha=settings["weight_decay"])
        momentum = settings["momentum"]
        if not momentum:
            return piece
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(piece)
        state["momentum"].mul_(momentum).add_(piece, alpha=1 - momentum if self.momentum_is_average else 1.0)
        if self.momentum_is_average:
            return state["momentum"] / (1 - momentum ** state["step"])
        return state["momentum"]

    def _directions(self, block: ParameterBlock, pieces: Pieces) -> Pieces:
        """Return G⁻¹ x. Cost: two passes over B."""
        owner = block.parameters[0]
        key = (block.settings.get("damping"), block.settings["decay"], block.state.get("num_updates", 0))
        known = self._inverses.get(owner)
        if known is None or known[0] != key:
            matrix = self._inverse(block).to(block.dtype).to(owner.device, non_blocking=True)
            known = self._inverses[owner] = (key, self._scale(block), matrix)
        _, scale, matrix = known
        return block.minus_combination(pieces, matrix @ block.product(pieces), scale=scale)

    def _warn(self, what: str, outcome: str) -> None:
        warnings.warn(
            f"{type(self).__name__} found NaN or infinity in {what}, or numbers beyond the range of its "
            f"precision, and {outcome}. If this goes on, the iteration has diverged: lower lr, or raise damping.",
            RuntimeWarning,
            stacklevel=3,
        )

    # Blocks

    def _blocks(self) -> list[ParameterBlock]:
        blocks: list[tuple[list[Tensor], dict[str, Any]]] = []
        together: list[Tensor] = []
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.numel() > 0]
            if group["scope"] == "global":
                _check_common(self.param_groups[0], group)
                together += members
            else:
                separate = [[p] for p in members] if group["scope"] == "tensor" else [members]
                blocks += [(of_block, group) for of_block in separate if of_block]
        if together:
            blocks.insert(0, (together, self.param_groups[0]))
        return [self._block(members, settings) for members, settings in blocks]

    def _block(self, members: list[Tensor], settings: dict[str, Any]) -> ParameterBlock:
        return ParameterBlock(members, self.state, settings)

    # What a subclass says

    @abstractmethod
    def _measure(self, block: ParameterBlock, pieces: Pieces) -> tuple[Pieces, Tensor]:
        """Return a vector that `_update_block` needs, and the numbers that it needs on the host, (n,) double."""

    @abstractmethod
    def _update_block(self, block: ParameterBlock, pieces: Pieces, numbers: Tensor) -> None:
        """Bring a measured gradient into the block's state."""

    @abstractmethod
    def _scale(self, block: ParameterBlock) -> float:
        """Return the scale of G⁻¹."""

    @abstractmethod
    def _inverse(self, block: ParameterBlock) -> Tensor:
        """Return A, (rank, rank), in double precision on the host."""

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse settings out of range and parameters of another kind."""
        name = type(self).__name__
        if not group["lr"] >= 0:
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        if group["rank"] < 1:
            raise ValueError(f"rank must be at least 1, got {group['rank']}; it is τ of the paper, 1 to 32 there")
        if not 0 < group["decay"] < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {group['decay']}; the paper uses 0.99")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {group['momentum']}")
        if not group["weight_decay"] >= 0:
            raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
        if group["clip"] is not None and not group["clip"] > 0:
            raise ValueError(f"clip must be positive, or None for no clipping, got {group['clip']}")
        if group["scope"] not in ("global", "group", "tensor"):
            raise ValueError(f"scope must be 'global', 'group' or 'tensor', got {group['scope']!r}")
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise TypeError(f"{name} needs real floating-point parameters, got {parameter.dtype}")


def _check_common(first: dict[str, Any], group: dict[str, Any]) -> None:
    for name in _SHARED:
        if first.get(name) != group.get(name):
            raise ValueError(
                f"with scope='global' all groups share one matrix and need one {name}, got {first.get(name)} and "
                f"{group.get(name)}: use scope='group' for settings of their own"
            )
