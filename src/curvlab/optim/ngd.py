"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import not_negative, real, whole
from curvlab.optim.flat import CheckedOptimizer, Closure, DivergedError, evaluate

_NAMES = ("factor", "eigenvalues", "rho")  # W, D and ρ in the state
_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins
_MAX_DEFAULT_RANK = 80
_MIN_CHANNELS = 16  # input channels: a convolution's kernel is then laid out in front of its channels
_MAX_BATCH = 2**20  # elements: larger tensors gain nothing from company, and fall out of the cache


class NGD(CheckedOptimizer):
    """w <- w - lr · (F + κI)⁻¹ ∇L, F estimated per axis of each parameter tensor (Saghir et al. 2024, Eqs. 5-7).

    The paper cites no code for its NGD. That it is Kaldi's online natural gradient (Povey, Zhang & Khudanpur 2015)
    is our reading of κ = α/d · tr(F). Take an axis of size d of a parameter tensor. The rows of X, (N, d), are the
    slices of the gradient along that axis, one for each index of the other axes, and F = RᵀDR + ρI, with R of r
    rows, is a moving average of XᵀX/N. The gradient is multiplied by β(F + κI)⁻¹ = I - WᵀW along its first axis,
    the result along the second, and so on; axes of size 1 are passed over. The result is rescaled to the norm of
    the gradient after each axis, so that only its direction differs from SGD's. With rescale=False it is
    β(F + κI)⁻¹X itself, which is shorter than X, and shortest in directions where gradients are large. For α -> ∞
    both are SGD at this lr (the paper's Eq. 5, which has no β, would be SGD at lr/κ).

    The first gradient updates F of each axis three times before it is multiplied. Then each of the first ten
    calls of `step`, and every update_period-th after them, updates F with its gradient after the multiplication.
    F starts at ε; but on an axis with fewer rows than the rank (a bias has one row) that would leave directions to
    rounding, and F starts at the mean square of the first gradient that is not zero.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NGD(model.parameters(), lr=0.03, alpha=0.1)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> optimizer.step()
        >>> [tuple(optimizer.state[model.weight][f"factor_{axis}"].shape) for axis in (0, 1)]
        [(1, 2), (2, 3)]

    State of a parameter: "step", the calls so far, and for axis k "factor_k" (W, (r, d)), "eigenvalues_k"
    (D, (r,)), "rho_k" (ρ, ()). Parameters without a gradient are skipped.

    Args:
        params: float32 or float64; settings may differ between groups.
        lr: factor of the step.
        alpha: α, smoothing; Kaldi's 4 is strong, the paper uses 0.01 to 0.1; 0 is allowed.
        rank: r, at most d - 1 where an axis is shorter; None: min((d + 1) // 2, 80).
        update_period: calls between updates of F after the first ten.
        eta: η, weight of the newest gradient in F, between 0 and 1.
        epsilon: ε, floor of the eigenvalues of F (squared gradient).
        delta: δ, the same relative to the largest.
        rescale: rescale the result to the gradient's norm after each axis.
        weight_decay: added to the gradient, times the parameters, as in torch.optim.SGD: F sees the sum.
        maximize: step uphill.

    Cost of a step: 4r flops for each element and axis (in steps of Adam: `make bench-speed`).
    An update of F costs about half as much again, and an (r, r) eigendecomposition for each axis. Memory: 2r·d
    numbers for each axis, and r·d in double precision for those of one dimension. Two buffers, kept between steps:
    2 * 2^20 numbers, or twice the largest tensor if that is more. A copy of the gradients with weight_decay or
    maximize. Each step waits for the device once, to check the gradients; updates for their decompositions, too.

    Raises:
        ValueError: a setting out of range.
        DivergedError: gradients that are not finite: no step is taken, and the state stays as it was.
        TypeError: parameters or gradients of another kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        alpha: float = 4.0,
        rank: int | None = None,
        update_period: int = 4,
        eta: float = 0.1,
        epsilon: float = 1e-10,
        delta: float = 5e-4,
        rescale: bool = True,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        self._known: list[list[int]] = []
        self._batches: list[_Batch] = []
        settings = {
            "lr": lr,
            "alpha": alpha,
            "rank": rank,
            "update_period": update_period,
            "eta": eta,
            "epsilon": epsilon,
            "delta": delta,
            "rescale": rescale,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it has any."""
        _check(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known, self._batches = [], []  # built again from the state, which may have been loaded

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | float | None:  # type: ignore[override]
        """Take one step; return the closure's loss."""
        loss = evaluate(closure)
        self._find_batches()
        gradients = [batch.gradients() for batch in self._batches]
        squared_norms = [torch.stack(torch._foreach_norm(own)).square() for own in gradients]
        _check_finite(self._batches, squared_norms)
        for batch, own, squared in zip(self._batches, gradients, squared_norms, strict=True):
            batch.take_step(own, squared)
        return loss

    def _find_batches(self) -> None:
        """Batch the parameters that have gradients, when these parameters have changed."""
        known = [[id(g), *(id(p) for p in g["params"] if p.grad is not None)] for g in self.param_groups]
        if known == self._known:
            return
        alike: dict[Any, list[Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in [p for p in group["params"] if p.grad is not None and p.numel() > 0]:
                _check_gradient(parameter)
                state = self.state[parameter]
                if not state:
                    state.update(_initial_state(parameter, group))
                alike.setdefault((index, parameter.dtype, parameter.device, state["step"]), []).append(parameter)
        found = [(*sized, index) for (index, *_), own in alike.items() for sized in _chunks(own, self.state)]
        # Those of a dtype and device share the buffers of the largest: memory that is allocated anew in each step
        # costs more, in page faults, than the arithmetic on it.
        buffers: dict[Any, Tensor] = {}
        batches = []
        for size, chunk, index in sorted(found, key=itemgetter(0), reverse=True):
            kind = chunk[0].dtype, chunk[0].device
            if kind not in buffers:
                buffers[kind] = chunk[0].new_empty(2, size)
            batches.append(_Batch(chunk, [self.state[p] for p in chunk], self.param_groups[index], buffers[kind]))
        self._known, self._batches = known, batches


class _Estimates(NamedTuple):
    """F = RᵀDR + ρI of A axes, and what they learn from a gradient (Povey, Zhang & Khudanpur 2015).

    Kept as W = E^½R with E = (β/D + 1)⁻¹, so that β(F + κI)⁻¹ = I - WᵀW; β = ρ(1+α) + α tr(D)/d, that is
    κ = α/d tr(F) (Saghir et al. 2024, Eq. 7), up to the rank's share of ρ.

    A row for each axis: `D`, (A, largest rank), ends with the axis's eigenvalues, rising, and begins with zeros
    (`used`: where it does not); `rho`, `dims` d, `num_rows` N of X, and `norms` ‖X‖ of the X observed last, (A,).
    Axes of equal rank and d stand together: `kinds` are their rows, W and J = WXᵀX, both (rows, rank, d).
    """

    D: Tensor
    rho: Tensor
    used: Tensor
    dims: Tensor
    num_rows: Tensor
    norms: Tensor
    kinds: list[tuple[slice, Tensor, Tensor]]

    def of(self, rows: slice, W: Tensor, J: Tensor) -> _Estimates:
        """Return the estimates of some rows of one kind, which stay those of the whole."""
        return _Estimates._make((*(values[rows] for values in self[:-1]), [(slice(None), W, J)]))

    # Differs from Kaldi's OnlineNaturalGradient in:
    # 1. The rows of X are slices of the batch's mean gradient; Kaldi's are derivatives of single frames.
    # 2. Kaldi forms Z = YYᵀ from K and L of J and H, and repairs the rows of R when they are not orthonormal. We
    #    form it from Y itself, which restores orthonormal rows in each update.
    # 3. YYᵀ squares the condition of Y, so it is formed and decomposed in double precision. Values of C below
    #    (ρ(1-η))², which exact arithmetic never reaches, are raised to it, as in Kaldi, and those below rounding.
    # 4. An axis with fewer rows than the rank starts at the mean square of its first gradient.
    def update(self, gradients: Tensor, settings: dict[str, Any]) -> None:
        """F <- (η/N) XᵀX + (1-η) F =: T, truncated to its rank, for the X observed, rescaled if asked for.

        Y = RT, (rank, d), with YYᵀ = UCUᵀ gives R' = C^-½ UᵀY, ρ' = (tr T - tr C^½)/(d - rank) and D' = C^½ - ρ',
        both at least max(ε, δ max C^½): a step of subspace iteration. `gradients`: ‖·‖² of each axis's gradient,
        (A,), which must be finite, as NGD checks.
        """
        eta, epsilon, tiny = settings["eta"], settings["epsilon"], torch.finfo(self.rho.dtype).tiny
        ranks = self.used.sum(1)
        observed = self.norms.square()
        totals = gradients if settings["rescale"] else observed  # ‖X‖²
        # With fewer rows than the rank, the first gradient leaves directions in which T is ε times the identity,
        # 1e-10 beside the gradient: the recursion would take them from rounding. F starts at ‖X‖²/(N d), its mean
        # eigenvalue, there. W does not change: E is the same wherever ρ = D.
        floor = epsilon * (1 + 1e-5)
        fresh = (self.num_rows < ranks) & (self.rho <= floor) & (self.D[:, -1] <= floor)
        mean = (totals / (self.num_rows * self.dims)).clamp_min(epsilon)
        D = torch.where(fresh[:, None], mean[:, None] * self.used, self.D)
        rho = torch.where(fresh, mean, self.rho)
        # Y = E^-½ [(η/N) J + (1-η)(D + ρ) W], written where J stood; what the zeros in D give is never read.
        inverse_root = (self._beta(D, rho, settings)[:, None] / D + 1).sqrt()[..., None]
        share = eta / self.num_rows
        of_new = (share * totals / observed.clamp_min(tiny))[:, None, None] * inverse_root
        of_old = (1 - eta) * (D + rho[:, None])[..., None] * inverse_root
        C, rotations = torch.zeros_like(D, dtype=torch.float64), []
        for rows, W, Y in self.kinds:
            rank = W.shape[1]
            Y.mul_(of_new[rows, -rank:]).addcmul_(of_old[rows, -rank:], W)
            wide = Y.double()
            C[rows, -rank:], rotation = torch.linalg.eigh(wide @ wide.mT)
            rotations.append(rotation)
        D, rho = D.double(), rho.double()
        least = ((1 - eta) * rho).square().maximum(ranks * torch.finfo(C.dtype).eps * C[:, -1])
        root = C.maximum(least[:, None]).sqrt() * self.used
        trace = share * totals.double() + (1 - eta) * (self.dims * rho + D.sum(1))
        rho = (trace - root.sum(1)) / (self.dims - ranks)
        floor = (settings["delta"] * root[:, -1]).clamp_min(epsilon)
        self.D.copy_((root - rho[:, None]).maximum(floor[:, None]) * self.used)
        self.rho.copy_(rho.maximum(floor))
        left = ((self._beta(self.D, self.rho, settings)[:, None] / self.D + 1).rsqrt() / root)[..., None]
        for (rows, W, Y), rotation in zip(self.kinds, rotations, strict=True):  # W' = E'^½ C^-½ Uᵀ Y
            torch.bmm((left[rows, -W.shape[1] :] * rotation.mT).to(W.dtype), Y, out=W)

    def _beta(self, D: Tensor, rho: Tensor, settings: dict[str, Any]) -> Tensor:
        return rho * (1 + settings["alpha"]) + settings["alpha"] / self.dims * D.sum(1)


class _Axis:
    """One axis of n tensors of one shape, in the buffer `x`, (n, before, dim, after), and products along it.

    `kind`: (rank, dim); `number` of the axis in the parameters; `places` of the tensors in their batch. All views
    are made once: on small tensors they would take longer than the arithmetic.
    """

    def __init__(self, x: Tensor, scratch: Tensor, rank: int, number: int, places: slice) -> None:
        n, before, dim, after = x.shape
        self.kind, self.number, self.places = (rank, dim), number, places
        self.count, self.num_rows, self._flat = n, before * after, x.view(n, -1)
        self._in_rows, self._repeats = after == 1, before
        hidden = scratch[: n * before * rank * after]  # rank < dim, so it fits
        if self._in_rows:
            self._X, self._H = x.view(n, before, dim), hidden.view(n, before, rank)
        else:
            self._X, self._H = x.view(n * before, dim, after), hidden.view(n * before, rank, after)
        self._X_mT, self._H_mT = self._X.mT, self._H.mT

    def bind(self, estimates: _Estimates) -> None:
        """Multiply with the W of these estimates, (n, rank, dim), and observe for them."""
        self.estimates = estimates
        ((_, self._W, self._J),) = estimates.kinds
        self._W_mT, self._spread_W = self._W.mT, self._W[:, None].expand(-1, self._repeats, -1, -1)

    def multiply(self, *, observe: bool) -> None:
        """X <- X - XWᵀW. Cost: 4 · rank flops for each element; to observe, half as much again."""
        W_mT = self.observe() if observe else self._project()
        self._X.baddbmm_(*((self._H, self._W) if self._in_rows else (W_mT, self._H)), alpha=-1)

    def observe(self) -> Tensor:
        """Note ‖X‖ and J = WXᵀX in the estimates; return Wᵀ, for each matrix in the buffer."""
        torch.linalg.vector_norm(self._flat, dim=1, out=self.estimates.norms)
        W_mT = self._project()
        if self._in_rows:
            torch.bmm(self._H_mT, self._X, out=self._J)
        elif self._repeats == 1:
            torch.bmm(self._H, self._X_mT, out=self._J)
        else:
            torch.sum(torch.bmm(self._H, self._X_mT).view(self._spread_W.shape), 1, out=self._J)
        return W_mT

    def _project(self) -> Tensor:
        """Write H = XWᵀ to the scratch buffer; return Wᵀ, for each matrix in the buffer."""
        if self._in_rows:
            torch.bmm(self._X, self._W_mT, out=self._H)
            return self._W_mT
        W = self._W if self._repeats == 1 else self._spread_W.flatten(0, 1)
        torch.bmm(W, self._X, out=self._H)
        return self._W_mT if self._repeats == 1 else W.mT


class _Batch:
    """Parameters of one group, dtype, device and number of steps, whose gradients share the buffers.

    Those of one shape and rank stand in one stack, so that one operation serves all of them. A convolution's
    kernel stands in front of its channels, which then make few, large matrix products; few input channels would
    make many thin ones, so there the order stays.
    """

    def __init__(self, parameters: list[Tensor], states: list[Any], group: Any, buffers: Tensor) -> None:
        self.parameters, self._states, self._group = parameters, states, group
        self._slots: list[Tensor] = []  # the buffer as the parameters see it
        self._stacks: list[tuple[Tensor, Tensor]] = []  # and as vectors, (n, size), with a place for their norms
        self._axes: list[_Axis] = []
        self._norms = buffers.new_empty(len(parameters))
        first = start = 0
        for (shape, ranks), alike in groupby(map(_form, parameters, self._states)):
            places = slice(first, first := first + len(list(alike)))
            kernel_first = len(shape) > 2 and shape[1] >= _MIN_CHANNELS
            order = [*range(2, len(shape)), 0, 1] if kernel_first else [*range(len(shape))]
            sizes = [len(self._norms[places]), *(shape[axis] for axis in order)]
            stack = buffers[0, start : (start := start + math.prod(sizes))].view(sizes)
            self._slots += [own.permute([order.index(axis) for axis in range(len(order))]) for own in stack]
            self._stacks.append((stack.view(len(stack), -1), self._norms[places]))
            for axis, rank in ranks:
                layout = len(stack), math.prod(sizes[1 : 1 + order.index(axis)]), shape[axis], -1
                self._axes.append(_Axis(stack.view(layout), buffers[1], rank, axis, places))
        self._gather()

    def _gather(self) -> None:
        """Gather the estimates of all axes, those of one rank and dimension in one tensor; states become views.

        Small networks have many axes and few numbers in each: what an update takes there is the number of calls.
        """
        axes = sorted(self._axes, key=attrgetter("kind"))
        owned = [(axis, place) for axis in axes for place in range(len(self._states))[axis.places]]
        numbers = self._norms.new_tensor([(*axis.kind, axis.num_rows, place) for axis, place in owned])
        ranks, dims, num_rows, owner = numbers.view(len(owned), 4).unbind(1)
        largest = axes[-1].kind[0] if axes else 1
        used = torch.arange(largest, device=ranks.device) >= largest - ranks[:, None]
        D, rho, norms = torch.zeros_like(used, dtype=ranks.dtype), torch.empty_like(ranks), torch.empty_like(ranks)
        self._owner, self._estimates = owner.long(), _Estimates(D, rho, used, dims, num_rows, norms, [])
        start = 0
        for kind, alike in groupby(axes, key=attrgetter("kind")):
            members = list(alike)
            counts = [axis.count for axis in members]
            first, rows = start, slice(start, start := start + sum(counts))
            W, J = D.new_empty(2, sum(counts), *kind)
            self._estimates.kinds.append((rows, W, J))
            for (axis, place), *views in zip(owned[rows], W, D[rows, -kind[0] :], rho[rows], strict=True):
                for name, view in zip(_NAMES, views, strict=True):
                    key = f"{name}_{axis.number}"
                    self._states[place][key] = view.copy_(self._states[place][key])
            for axis, *own in zip(members, W.split(counts), J.split(counts), strict=True):
                axis.bind(self._estimates.of(slice(first, first := first + axis.count), *own))

    def gradients(self) -> list[Tensor]:
        """Return the gradients: p.grad, or ±p.grad + weight_decay · p as a copy."""
        gradients: Any = [parameter.grad for parameter in self.parameters]
        if self._group["maximize"]:
            gradients = torch._foreach_neg(gradients)
        if decay := self._group["weight_decay"]:
            gradients = torch._foreach_add(gradients, self.parameters, alpha=decay)
        return list(gradients)

    def take_step(self, gradients: list[Tensor], squared_norms: Tensor) -> None:
        """Move the parameters; in calls that update, bring the gradients, with their ‖·‖², into the estimates."""
        step = self._states[0]["step"]
        updates = step < _INITIAL_UPDATES or step % self._group["update_period"] == 0
        torch._foreach_copy_(self._slots, gradients)
        for axis in self._axes:
            for _ in range(_START_UPDATES if step == 0 else 0):
                axis.observe()
                axis.estimates.update(squared_norms[axis.places], self._group)
            axis.multiply(observe=updates)
        # The products are linear, so the rescaling of all axes is done once, at the end.
        factors = torch.full_like(squared_norms, -float(self._group["lr"]))
        if self._group["rescale"]:
            for stack, norms in self._stacks:
                torch.linalg.vector_norm(stack, dim=1, out=norms)
            factors *= (squared_norms / self._norms.square().clamp_min(torch.finfo(factors.dtype).tiny)).sqrt()
        torch._foreach_addcmul_(self.parameters, self._slots, factors.unbind())
        if updates:
            self._estimates.update(squared_norms[self._owner], self._group)
        for state in self._states:
            state["step"] = step + 1


def _chunks(parameters: list[Tensor], states: dict[Tensor, Any]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield what goes through the buffers together, with its size: equal forms side by side, and not too much."""
    size, chunk = 0, list[Tensor]()
    for parameter in sorted(parameters, key=lambda parameter: _form(parameter, states[parameter])):
        if chunk and size + parameter.numel() > _MAX_BATCH:
            yield size, chunk
            size, chunk = 0, []
        chunk.append(parameter)
        size += parameter.numel()
    yield size, chunk


def _form(parameter: Tensor, state: dict[str, Any]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the shape, and the axes longer than 1, which have estimates, with their ranks."""
    shape = tuple(parameter.shape)
    return shape, tuple((axis, len(state[f"eigenvalues_{axis}"])) for axis, dim in enumerate(shape) if dim > 1)


def fitting_rank(dim: int, rank: int | None) -> int:
    """Return the rank used for an axis: at most dim - 1; None: half the axis, at most 80."""
    return min(rank or min((dim + 1) // 2, _MAX_DEFAULT_RANK), dim - 1)


def _initial_state(parameter: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter before any gradient: for each axis ρ = D = ε and a fixed R.

    Row i of R is non-zero in columns i, i + rank, i + 2 rank, ..., the first of them 1.1 times the others.
    """
    state: dict[str, Any] = {"step": 0}
    for axis, dim in [(axis, dim) for axis, dim in enumerate(parameter.shape) if dim > 1]:
        rank = fitting_rank(dim, settings["rank"])
        basis = torch.eye(rank, dtype=parameter.dtype, device=parameter.device).repeat(1, dim // rank + 1)[:, :dim]
        basis[:, :rank] *= 1.1
        basis = basis / torch.linalg.vector_norm(basis, dim=1, keepdim=True)
        weight = 1 / (2 + settings["alpha"] * (dim + rank) / dim)  # E where ρ = D
        floor = basis.new_tensor(settings["epsilon"])
        values = weight**0.5 * basis, floor.repeat(rank), floor
        state |= {f"{name}_{axis}": value for name, value in zip(_NAMES, values, strict=True)}
    return state


def _check_finite(batches: list[_Batch], squared_norms: list[Tensor]) -> None:
    """Raise where a gradient is not finite; wait for the device once, whatever the number of batches."""
    sums = [own.sum().to(squared_norms[0].device) for own in squared_norms]
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return
    for batch, own in zip(batches, squared_norms, strict=True):
        for parameter, squared_norm in zip(batch.parameters, own.tolist(), strict=True):
            if not math.isfinite(squared_norm):
                raise DivergedError(
                    f"NGD found NaN or infinity in a gradient of shape {tuple(parameter.shape)}, or one beyond "
                    "its range, and took no step: the iteration has diverged. Lower lr, or raise alpha."
                )


def _check_gradient(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"NGD needs float32 or float64 parameters, got {parameter.dtype}: keep master weights in float32 and "
            "use torch.autocast for the forward pass."
        )
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise TypeError("NGD needs dense gradients, got sparse ones: use nn.Embedding(sparse=False).")


def _check(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        not_negative(name, group[name])
    if not 0 <= real("alpha", group["alpha"]) < math.inf:
        raise ValueError(f"alpha must be finite and at least 0, got {group['alpha']}; the paper uses 0.01 to 0.1")
    if not 0 < real("eta", group["eta"]) < 1:
        raise ValueError(f"eta is the weight of the newest gradient and lies between 0 and 1, got {group['eta']}")
    if not 0 < real("epsilon", group["epsilon"]) < math.inf or not 0 < real("delta", group["delta"]) < 1:
        raise ValueError(f"epsilon must be positive, delta from 0 to 1, got {group['epsilon']}, {group['delta']}")
    whole("update_period", group["update_period"])
    if group["rank"] is not None:
        whole("rank", group["rank"], why="None chooses min((d + 1) // 2, 80) for each axis")
