"""Optimizers that precondition by a multiple of the identity plus a matrix of low rank: what they share.

`ParameterBlock`: parameters that share one matrix, and the rows of its basis that belong to each of them.
`LowRankOptimizer`: curvature in, steps out; Ginger and QNG say how the rows follow the gradients.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import not_negative, real, whole
from curvlab.optim.flat import CheckedOptimizer, Closure, evaluate

Scope = Literal["global", "group", "tensor"]
Pieces = dict[Tensor, Tensor]  # parameter -> its part of a vector, (numel,), in the block's dtype

_CHUNK = 2**18  # numbers that are held in double precision at a time
_SHARED = ("rank", "decay", "damping", "scope", "as_coded", "normalize")  # one for a matrix of several groups
_ON_HOST = ("core", "gram")  # (rank, rank) in double precision: kept in main memory


class ParameterBlock:
    """P parameters, and B, (num_rows, P): vectors of all of them, one in each row.

    B is kept in pieces, `states[parameter]["rows"]`, (num_rows, numel). A parameter without a piece, because it
    never had a gradient, counts as zeros; so do parameters that are left out of a vector.

    Attributes:
        parameters: in the order of the optimizer's groups.
        states: state of each parameter; what belongs to the whole block is kept by the first.
        settings: rank, decay and the like, of the first parameter's group.
        num_rows: of B.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]], settings: dict[str, Any]
    ) -> None:
        self.parameters = list(parameters)
        self.states = states
        self.settings = settings
        self.num_rows: int = settings["rank"]
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self.dtype = torch.float64 if wide else torch.float32
        if len({parameter.device for parameter in parameters}) > 1:
            way_out = "use scope='tensor', or one group for each device and scope='group'"
            raise ValueError(f"parameters that share a curvature matrix must be on one device: {way_out}")

    @property
    def size(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def state(self) -> dict[str, Any]:
        """What belongs to the whole block; created by writing to it."""
        return self.states[self.parameters[0]]

    def gradients(self, factor: float = 1.0) -> Pieces:
        """Return factor times the gradients there are, flat, in the block's dtype; often p.grad's own memory."""
        pieces = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    raise TypeError("gradients must be dense, got sparse ones: use nn.Embedding(sparse=False)")
                piece = parameter.grad.reshape(-1).to(self.dtype)
                pieces[parameter] = piece if factor == 1 else factor * piece
        return pieces

    def add_missing_rows(self, pieces: Pieces) -> None:
        """Create rows of zeros for parameters that have none yet."""
        for parameter, piece in pieces.items():
            if "rows" not in self.states[parameter]:
                self.states[parameter]["rows"] = piece.new_zeros(self.num_rows, len(piece))

    def rows(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's columns of B, (num_rows, numel); None stands for zeros."""
        state = self.states.get(parameter)
        return None if state is None else state.get("rows")

    def product(self, pieces: Pieces) -> Tensor:
        """Return B x, (num_rows,). Cost: one pass over B."""
        total = None
        for parameter, piece in pieces.items():
            rows = self.rows(parameter)
            if rows is not None:
                total = torch.mv(rows, piece) if total is None else torch.addmv(total, rows, piece)
        return self.parameters[0].new_zeros(self.num_rows, dtype=self.dtype) if total is None else total

    def minus_combination(self, pieces: Pieces, weights: Tensor, *, scale: float = 1.0) -> Pieces:
        """Return scale (x - Bᵀ weights). Cost: one pass over B, one new vector."""
        result = {}
        for parameter, piece in pieces.items():
            rows = self.rows(parameter)
            result[parameter] = (
                torch.addmv(piece, rows.mT, weights, beta=scale, alpha=-scale)
                if rows is not None
                else scale * piece
            )
        return result

    def set_row(self, index: int, pieces: Pieces) -> None:
        """Replace a row of B."""
        for parameter in self.parameters:
            rows = self.rows(parameter)
            if rows is not None:
                rows[index] = pieces.get(parameter, 0.0)

    def reflect_(self, unit: Tensor, extra: Pieces, extra_scale: float) -> None:
        """Reflect [B; y], y = extra_scale · extra, by I - 2uuᵀ, and keep all rows but the last, in place.

        `unit`: u, (num_rows + 1,), of norm 1, on the block's device. Cost: two passes over B, a vector for each
        parameter in turn.
        """
        head, last = unit[:-1], unit[-1]
        for parameter in self.parameters:
            rows = self.rows(parameter)
            if rows is None:
                continue
            mixed = rows.mT @ head
            if parameter in extra:
                mixed += (extra_scale * last) * extra[parameter]
            rows.addr_(head, mixed, alpha=-2)

    def gram(self) -> Tensor:
        """Return BBᵀ, (num_rows, num_rows), in double precision. Cost: 2 P num_rows² flops."""
        total = self.parameters[0].new_zeros(self.num_rows, self.num_rows, dtype=torch.float64)
        for chunk in self._chunks():
            wide = chunk.double()
            total += wide @ wide.mT
        return total

    def transform_(self, matrix: Tensor) -> None:
        """Replace B by `matrix` B, in place. Cost: 2 P num_rows² flops, a chunk of B as temporary."""
        wide = matrix.to(self.parameters[0].device, torch.float64)
        for chunk in self._chunks():
            chunk.copy_(wide @ chunk.double())

    def _chunks(self) -> list[Tensor]:
        found = [self.rows(parameter) for parameter in self.parameters]
        columns = max(1, _CHUNK // self.num_rows)
        return [chunk for rows in found if rows is not None for chunk in rows.split(columns, dim=1)]


def norm(pieces: Pieces) -> Tensor:
    """Return ‖x‖, (), in double precision."""
    norms = [torch.linalg.vector_norm(piece).double() for piece in pieces.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class LowRankOptimizer(CheckedOptimizer):
    """w <- w - lr · clip(G⁻¹ m), with G⁻¹ = scale (I - Bᵀ A B), B (rank, P) and A (rank, rank).

    G belongs to all parameters of a `ParameterBlock`; m is the gradient, averaged where there is momentum.
    A subclass says how B follows the sampled gradients (`_measure`, `_update_blocks`) and what A and scale are
    (`_inverse`).
    """

    # torch.amp.GradScaler then tells `step` whether it has unscaled the gradients, in `grad_scale`.
    _step_supports_amp_scaling = True
    momentum_is_average: bool  # m <- μ m + (1-μ) g, corrected for its start from zero; or else m <- μ m + g

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._forget()
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
        self._forget()

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
        self._forget()

    def _forget(self) -> None:
        self._inverses: dict[Tensor, tuple[Any, Tensor]] = {}
        self._known_blocks: tuple[Any, list[ParameterBlock]] | None = None
        self._scale_was_given = True  # of the sampled gradients since the last step
        self._has_warned = False

    # Curvature

    @torch.no_grad()
    def update_curvature(self, *, num_batches: int = 1, scale: float | torch.amp.GradScaler | None = None) -> None:
        """Bring p.grad, the gradient for labels that the model has drawn (`sampled_label_loss`), into G.

        A parameter without gradient counts as zeros. Gradients that are not finite change nothing, and warn.
        Cost: see the class; one wait for the device.

        Args:
            num_batches: k, where p.grad is the mean over k micro-batches (each with `sampled_label_loss` / k) or
                over k ranks. E d dᵀ of such a mean is 1/k of the Fisher matrix: √k p.grad is taken.
            scale: by how much p.grad is too long: a torch.amp.GradScaler whose `scale` the sampled loss went
                through, or a number. Do not call `unscale_` for it: GradScaler then leaves the gradient of the
                next `step` scaled, which `step` refuses.
        """
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {num_batches}")
        self._scale_was_given = scale is not None
        divisor = scale.get_scale() if isinstance(scale, torch.amp.GradScaler) else float(scale or 1)
        factor = num_batches**0.5 / divisor
        measured = []
        for block in self._blocks():
            pieces = block.gradients(factor)
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
        split = zip(measured, numbers.split(sizes), strict=True)
        self._update_blocks([(block, pieces, own) for (block, pieces, _), own in split])
        for block, *_ in measured:
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
            vectors = {p: given[p].to(block.dtype) for p in members}
            result |= self._directions(block, vectors, scale=self._scale(block))
        return torch.cat([result[parameter].to(vector) for parameter in in_order])

    # Steps

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step along p.grad, the gradient of the loss; return the closure's loss.

        A parameter without gradient stays where it is. Gradients that are not finite change nothing, and warn; so
        does a first step before any `update_curvature`.

        Raises:
            RuntimeError: torch.amp.GradScaler has unscaled the sampled gradient, so that this one is still scaled.
        """
        loss = evaluate(closure)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            if grad_scale is None and not self._scale_was_given:
                raise RuntimeError(
                    "GradScaler.unscale_ was called for this optimizer since its last step, and so was "
                    "update_curvature: it unscales once, so that the gradient of this step may still be scaled. "
                    "Leave unscale_ out and call update_curvature(scale=scaler); or say update_curvature(scale=1) "
                    "where the sampled loss was not scaled and unscale_ was for this gradient."
                )
            if bool(found_inf):
                return loss
        factor = 1.0 if grad_scale is None else float(1 / grad_scale)
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        with_gradients = [(block, pieces) for block in self._blocks() if (pieces := block.gradients(factor))]
        if not with_gradients:
            return loss
        self._scale_was_given = True
        self._warn_of_missing_curvature([block for block, _ in with_gradients])
        device = next(iter(with_gradients[0][1])).device
        norms = torch.stack([norm(pieces).to(device) for _, pieces in with_gradients]).tolist()  # the one wait
        scales = [1.0 if b.settings["normalize"] else self._scale(b) for b, _ in with_gradients]
        limits = [torch.finfo(block.dtype).max for block, _ in with_gradients]
        if not all(n * max(s, 1.0) < m for n, s, m in zip(norms, scales, limits, strict=True)):
            self._warn("the gradient", "took no step")
            return loss
        for (block, pieces), scale in zip(with_gradients, scales, strict=True):
            averaged = {p: self._with_momentum(p, piece, groups[p]) for p, piece in pieces.items()}
            for parameter, direction in self._directions(block, averaged, scale=scale).items():
                settings = groups[parameter]
                if settings["weight_decay"]:
                    parameter.mul_(1 - settings["lr"] * settings["weight_decay"])
                if settings["clip"] is not None:
                    direction.clamp_(-settings["clip"], settings["clip"])
                parameter.sub_(settings["lr"] * direction.view_as(parameter))
        return loss

    def _with_momentum(self, parameter: Tensor, piece: Tensor, settings: dict[str, Any]) -> Tensor:
        """Return m, (numel,); `piece` is the gradient's own memory, and is left alone."""
        if settings["maximize"]:
            piece = -piece
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

    def _directions(self, block: ParameterBlock, pieces: Pieces, *, scale: float) -> Pieces:
        """Return scale (I - Bᵀ A B) x. Cost: two passes over B."""
        owner = block.parameters[0]
        key = (block.settings.get("damping"), block.settings["decay"], block.state.get("num_updates", 0))
        known = self._inverses.get(owner)
        if known is None or known[0] != key:
            matrix = self._inverse(block).to(block.dtype).to(owner.device, non_blocking=True)
            known = self._inverses[owner] = (key, matrix)
        matrix = known[1]
        return block.minus_combination(pieces, matrix @ block.product(pieces), scale=scale)

    def _warn_of_missing_curvature(self, blocks: list[ParameterBlock]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        if not any(block.state.get("num_updates", 0) for block in blocks):
            name = type(self).__name__
            scale = 1.0 if blocks[0].settings["normalize"] else self._scale(blocks[0])
            warnings.warn(
                f"{name} steps before any update_curvature(): without curvature the step is {scale:.3g} lr times "
                "the gradient. Call update_curvature() with the gradient of sampled_label_loss first.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _warn(self, what: str, outcome: str) -> None:
        warnings.warn(
            f"{type(self).__name__} found NaN or infinity in {what}, or numbers beyond the range of its "
            f"precision, and {outcome}. If this goes on, the iteration has diverged: lower lr, or raise damping.",
            RuntimeWarning,
            stacklevel=3,
        )

    # Blocks

    def _blocks(self) -> list[ParameterBlock]:
        """Return the blocks, made anew where groups, their settings or the parameters' precision have changed."""
        layout = [
            [id(group), *map(group.get, _SHARED), *((id(p), p.dtype, p.device) for p in group["params"])]
            for group in self.param_groups
        ]
        if self._known_blocks is None or self._known_blocks[0] != layout:
            self._known_blocks = layout, self._made_blocks()
        return self._known_blocks[1]

    def _made_blocks(self) -> list[ParameterBlock]:
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
        """Return a vector that `_update_blocks` needs, and the numbers that it needs on the host, (n,) double."""

    @abstractmethod
    def _update_blocks(self, measured: list[tuple[ParameterBlock, Pieces, Tensor]]) -> None:
        """Bring measured gradients into the state of each block: block, vector and numbers as of `_measure`."""

    @abstractmethod
    def _scale(self, block: ParameterBlock) -> float:
        """Return the scale of G⁻¹."""

    @abstractmethod
    def _inverse(self, block: ParameterBlock) -> Tensor:
        """Return A, (rank, rank), in double precision on the host."""

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse settings out of range and parameters of another kind."""
        name = type(self).__name__
        real("decay", group["decay"]), real("momentum", group["momentum"])
        not_negative("lr", group["lr"]), not_negative("weight_decay", group["weight_decay"])
        whole("rank", group["rank"], why="it is τ of the paper, 1 to 32 there")
        if not 0 < group["decay"] < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {group['decay']}; the paper uses 0.99")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {group['momentum']}")
        if group["clip"] is not None and not real("clip", group["clip"]) > 0:
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
