"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import real, whole
from curvlab.optim.axis_fisher import AxisFisher, FisherUpdate, gathered, initial_state, long_axes, rank_and_dim
from curvlab.optim.flat import Closure, DivergedError, evaluate

_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins
_MIN_CHANNELS = 16  # input channels: a convolution's kernel is then laid out in front of its channels
_MAX_KERNEL = 128  # elements: the axes of a kernel are then multiplied together
_MAX_STACKED = 2**20  # elements: larger tensors gain nothing from being stacked, and fall out of the cache
_MAX_WAVE = 2**16  # elements: with more, a wave falls out of the cache, and calls no longer matter
_ALIGNED = 16  # elements: where stacks begin in the buffers

States = Mapping[Tensor, dict[str, Any]]


class NGD(torch.optim.Optimizer):
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

    Cost of a step: 4r flops for each element and axis (2d where that is less; between updates, 2k for all axes
    together of a convolution's kernel of k <= 128 numbers). An update of F costs about half as much again, and an
    (r, r) eigendecomposition for each axis. ResNet-18 on two cores: 83 to 96 ms, 48 to 51 of them for the large
    products; LeNet-5 on one: 1.6 ms, 4 steps of Adam (`make bench-speed`). Memory: 2r·d numbers for each axis,
    and r·d in double precision for those of one dimension. Two buffers, kept between steps, that hold gradients of
    one shape: 2 * 2^20 numbers, or twice the largest tensor if that is more. A copy of the gradients with
    weight_decay or maximize.
    Each step waits for the device once, to check the gradients; updates wait for their eigendecompositions, too.

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
        self._active: list[list[int]] = []
        self._cohorts: list[list[_Cohort]] = []
        defaults = {
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
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it has any."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._active, self._cohorts = [], []  # built again from the state, which may have been loaded

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss."""
        loss = evaluate(closure)
        self._find_cohorts()
        work = [
            (cohort, group, cohort.gradients(group))
            for group, of_group in zip(self.param_groups, self._cohorts, strict=True)
            for cohort in of_group
        ]
        squared_norms = [torch.stack(torch._foreach_norm(gradients)).square() for *_, gradients in work]
        _check_finite([cohort for cohort, *_ in work], squared_norms)
        for (cohort, group, gradients), own in zip(work, squared_norms, strict=True):
            cohort.take_step(gradients, own, group)
        return loss

    def _find_cohorts(self) -> None:
        """Build the cohorts of the parameters that have gradients, when these parameters have changed."""
        active = [
            [parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel() > 0]
            for group in self.param_groups
        ]
        known = [[id(parameter) for parameter in of_group] for of_group in active]
        if known == self._active:
            return
        self._cohorts = []
        alike: dict[tuple[torch.dtype, torch.device], list[_Cohort]] = {}
        for group, of_group in zip(self.param_groups, active, strict=True):
            of_kind: dict[Any, list[Tensor]] = {}
            for parameter in of_group:
                _check_gradient(parameter)
                if not self.state[parameter]:
                    self.state[parameter].update(initial_state(parameter, group))
                key = (parameter.dtype, parameter.device, self.state[parameter]["step"])
                of_kind.setdefault(key, []).append(parameter)
            self._cohorts.append([_Cohort(members, self.state) for members in of_kind.values()])
            for (dtype, device, _), cohort in zip(of_kind, self._cohorts[-1], strict=True):
                alike.setdefault((dtype, device), []).append(cohort)
        # All cohorts of a dtype and device share two buffers: memory that is allocated anew in each step costs
        # more, in page faults, than the arithmetic on it.
        for (dtype, device), members in alike.items():
            size = max(cohort.buffer_size for cohort in members)
            buffers = torch.empty(2, size, dtype=dtype, device=device)
            for cohort in members:
                cohort.bind(buffers)
        self._active = known


class _Stack:
    """Parameters of one shape and number of steps, stacked, so that one operation serves all of them.

    A convolution's kernel stands in front of its channels, which then make few, large matrix products; few input
    channels would make many thin ones, so there the order stays. `kernel` are the axes of a small kernel: between
    updates one matrix, their Kronecker product, takes all of them at once.
    """

    def __init__(self, parameters: list[Tensor], states: States) -> None:
        like = parameters[0]
        self.parameters = parameters
        self._order = list(range(like.ndim))
        kernel_first = like.ndim > 2 and like.shape[1] >= _MIN_CHANNELS
        if kernel_first:
            self._order = self._order[2:] + self._order[:2]
        sizes = [like.shape[axis] for axis in self._order]
        self._shape = (len(parameters), *sizes)
        self.size = math.prod(self._shape)
        self.aligned_size = -(-self.size // _ALIGNED) * _ALIGNED
        self.axes: dict[int, AxisFisher] = {}  # those longer than 1, in the parameter's order
        for axis, dim in long_axes(like):
            place, rank = self._order.index(axis), len(states[like][f"eigenvalues_{axis}"])
            layout = math.prod(sizes[:place]), dim, math.prod(sizes[place + 1 :])
            self.axes[axis] = AxisFisher(len(parameters), *layout, rank, is_first=not self.axes)
        few = kernel_first and math.prod(like.shape[2:]) <= _MAX_KERNEL
        self.kernel = [own for axis, own in self.axes.items() if few and axis >= 2]
        self.kernel_inverses: list[Tensor] | None = None

    def bind(self, x: Tensor, scratch: Tensor, place: slice) -> None:
        """Work in two buffers, (size,); `place`: of the parameters among those of the wave."""
        self.place = place
        x, scratch = x.view(self._shape), scratch.view(self._shape)
        self.slots = self._as_parameters(x)
        self._targets = list(x.view(len(x), math.prod(axis.dim for axis in self.kernel), -1))
        axes, results = list(self.axes.values()), [x]
        for axis in axes:
            result, scratch = axis.bind(results[-1], scratch)
            results.append(result)
        # Between updates the kernel's axes are not taken in turn; with an update all are.
        self.in_turn = {False: axes[: len(axes) - len(self.kernel)], True: axes}
        ends = {observe: results[len(taken)] for observe, taken in self.in_turn.items()}
        self.results = {observe: (self._as_parameters(end), end.view(len(x), -1)) for observe, end in ends.items()}

    def multiply_kernel(self, gradients: Sequence[Tensor]) -> None:
        """Write the products of the gradients along all axes of the kernel to the slots."""
        if self.kernel_inverses is None:
            product, *others = [axis.scaled_inverse() for axis in self.kernel]
            for matrix in others:  # A ⊗ B ⊗ ..., the first of which acts on the outermost axis
                size = product.shape[-1] * matrix.shape[-1]
                product = torch.einsum("bij,bkl->bikjl", product, matrix).reshape(-1, size, size)
            self.kernel_inverses = list(product)
        for gradient, target, inverse in zip(gradients, self._targets, self.kernel_inverses, strict=True):
            torch.mm(inverse, gradient.reshape(-1, len(inverse)).mT, out=target)

    def _as_parameters(self, stack: Tensor) -> list[Tensor]:
        inverse = [self._order.index(axis) for axis in range(len(self._order))]
        return [own.permute(inverse) for own in stack]


class _Wave:
    """Stacks that are multiplied one after another in the two buffers, and moved at once; from `first` on."""

    def __init__(self, stacks: list[_Stack], first: int, buffers: Tensor) -> None:
        self._stacks = stacks
        self._parameters = [parameter for stack in stacks for parameter in stack.parameters]
        self.members = slice(first, first + len(self._parameters))  # of the cohort's parameters
        self._norms = buffers.new_empty(len(self._parameters))
        start = place = 0
        for stack in stacks:
            x, scratch = buffers[:, start : start + stack.size]
            stack.bind(x, scratch, slice(place, place + len(stack.parameters)))
            start, place = start + stack.aligned_size, place + len(stack.parameters)
        self._slots = [slot for stack in stacks for slot in stack.slots]
        self._kernels = [stack for stack in stacks if stack.kernel]
        copied = [stack for stack in stacks if not stack.kernel]
        self._copied = [index for stack in copied for index in range(stack.place.start, stack.place.stop)]
        self._copied_slots = [self._slots[index] for index in self._copied]
        self._in_turn = [axis for stack in stacks for axis in stack.in_turn[False]]
        self._results = {
            observe: (
                [result for stack in stacks for result in stack.results[observe][0]],
                [(stack.results[observe][1], self._norms[stack.place]) for stack in stacks],
            )
            for observe in (False, True)
        }

    def multiply(self, gradients: list[Tensor]) -> None:
        """Multiply the gradients along all axes; between updates, nothing but the result matters.

        Products along different axes commute, so those of a kernel come first, together.
        """
        for stack in self._kernels:
            stack.multiply_kernel(gradients[stack.place])
        if self._copied:
            torch._foreach_copy_(self._copied_slots, [gradients[index] for index in self._copied])
        for axis in self._in_turn:
            axis.multiply(observe=False)

    def multiply_and_observe(
        self, gradients: list[Tensor], squared_norms: Tensor, settings: dict[str, Any], *, start: bool
    ) -> None:
        """Multiply the gradients along axis after axis, and note for each what F has to learn from its X.

        The products are linear, so the rescaling of all axes is done once, at the end. Until then the X of an axis
        is what stands in the buffer times sqrt(pending).
        """
        torch._foreach_copy_(self._slots, gradients)
        for stack in self._stacks:
            for axis in stack.in_turn[True]:
                if not axis.is_first:
                    torch.linalg.vector_norm(axis.flat, dim=1, out=axis.norm)
                if start:
                    of_gradients = squared_norms[stack.place]
                    own = of_gradients if axis.is_first else axis.norm.square()
                    update = FisherUpdate([axis], axis.eigenvalues.view(-1), axis.rho)
                    for _ in range(_START_UPDATES):
                        axis.observe()
                        update(own, _pending(of_gradients, own, settings), settings)
                axis.multiply(observe=True)
            stack.kernel_inverses = None  # those of the W before

    def move(self, squared_norms: Tensor, settings: dict[str, Any], *, observed: bool) -> None:
        """Take the step, -lr times the products, rescaled to the gradients' norms if asked for."""
        factor = -float(settings["lr"])
        results, norms = self._results[observed]
        if settings["rescale"]:
            for flat, norm in norms:
                torch.linalg.vector_norm(flat, dim=1, out=norm)
            factors = factor * _ratio(squared_norms, self._norms.square()).sqrt()
        else:
            factors = torch.full_like(squared_norms, factor)
        torch._foreach_addcmul_(self._parameters, results, factors.unbind())


class _Cohort:
    """Parameters of one group, dtype and device that have taken equally many steps, stack by stack."""

    def __init__(self, parameters: list[Tensor], states: States) -> None:
        self._stacks = [_Stack(members, states) for members in _by_shape(parameters, states)]
        self.parameters = [parameter for stack in self._stacks for parameter in stack.parameters]
        self._states = [states[parameter] for parameter in self.parameters]
        self._step = int(self._states[0]["step"])
        # Stacks that go through the buffers together: of at most _MAX_WAVE elements, or single ones.
        self._grouped: list[list[_Stack]] = [[]]
        for stack in self._stacks:
            if self._grouped[-1] and _size(self._grouped[-1]) + stack.aligned_size > _MAX_WAVE:
                self._grouped.append([])
            self._grouped[-1].append(stack)
        self.buffer_size = max(_size(stacks) for stacks in self._grouped)
        self._waves: list[_Wave] = []
        found: list[tuple[AxisFisher, int, range]] = []
        first = 0
        for stack in self._stacks:
            places = range(first, first := first + len(stack.parameters))
            found += [(own, axis, places) for axis, own in stack.axes.items()]
        found.sort(key=lambda item: rank_and_dim(item[0]))
        self._update: FisherUpdate | None = None
        if found:
            device = self.parameters[0].device
            self._owner = torch.tensor([place for *_, places in found for place in places], device=device)
            owned = [(own, axis, [self._states[place] for place in places]) for own, axis, places in found]
            self._update, self._norms = gathered(owned)
            is_first = [own.is_first for own, *_ in found for _ in range(own.count)]
            self._is_first = torch.tensor(is_first, device=device)

    def bind(self, buffers: Tensor) -> None:
        """Work in these two buffers, (2, buffer_size or more), which others may use between the steps."""
        first = 0
        for stacks in self._grouped:
            self._waves.append(_Wave(stacks, first, buffers))
            first = self._waves[-1].members.stop

    def gradients(self, settings: dict[str, Any]) -> list[Tensor]:
        """Return the gradients: p.grad, or ±p.grad + weight_decay · p as a copy."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if settings["maximize"]:
            gradients = [-gradient for gradient in gradients]
        if settings["weight_decay"]:
            pairs = zip(gradients, self.parameters, strict=True)
            gradients = [gradient.add(parameter, alpha=settings["weight_decay"]) for gradient, parameter in pairs]
        return gradients

    def take_step(self, gradients: list[Tensor], squared_norms: Tensor, settings: dict[str, Any]) -> None:
        """Move the parameters; in calls that update, bring the gradients into the estimates.

        `gradients` and their ‖·‖², (number of parameters,), in the order of `parameters`.
        """
        updates = self._step < _INITIAL_UPDATES or self._step % settings["update_period"] == 0
        for wave in self._waves:
            of_wave = squared_norms[wave.members]
            if updates:
                wave.multiply_and_observe(gradients[wave.members], of_wave, settings, start=self._step == 0)
            else:
                wave.multiply(gradients[wave.members])
            wave.move(of_wave, settings, observed=updates)
        self._step += 1
        for state in self._states:
            state["step"] = self._step
        if updates and self._update is not None:
            of_gradients = squared_norms.index_select(0, self._owner)
            own = torch.where(self._is_first, of_gradients, self._norms.square())
            self._update(own, _pending(of_gradients, own, settings), settings)


def _by_shape(parameters: list[Tensor], states: States) -> list[list[Tensor]]:
    """Return parameters of one shape and ranks together, at most _MAX_STACKED elements of them."""
    groups: dict[Any, list[list[Tensor]]] = {}
    for parameter in parameters:
        ranks = tuple(len(states[parameter][f"eigenvalues_{axis}"]) for axis, _ in long_axes(parameter))
        chunks = groups.setdefault((parameter.shape, ranks), [[]])
        if chunks[-1] and (len(chunks[-1]) + 1) * parameter.numel() > _MAX_STACKED:
            chunks.append([])
        chunks[-1].append(parameter)
    return [chunk for chunks in groups.values() for chunk in chunks]


def _size(stacks: list[_Stack]) -> int:
    return sum(stack.aligned_size for stack in stacks)


def _pending(gradients: Tensor, stacks: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return what ‖X‖² of a stack must be multiplied by: ‖·‖² of the gradient over its own."""
    return _ratio(gradients, stacks) if settings["rescale"] else torch.ones_like(stacks)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)


def _check_finite(cohorts: list[_Cohort], squared_norms: list[Tensor]) -> None:
    """Raise where a gradient is not finite; wait for the device once, whatever the number of cohorts."""
    if not cohorts:
        return
    device = squared_norms[0].device
    if math.isfinite(torch.stack([own.sum().to(device) for own in squared_norms]).sum().item()):
        return
    for cohort, own in zip(cohorts, squared_norms, strict=True):
        for parameter, squared_norm in zip(cohort.parameters, own.tolist(), strict=True):
            if not math.isfinite(squared_norm):
                raise DivergedError(
                    f"NGD found NaN or infinity in a gradient of shape {tuple(parameter.shape)}, or one beyond "
                    "its range, and took no step: the iteration has diverged. Lower lr, or raise alpha."
                )


def _check_gradient(parameter: Tensor) -> None:
    gradient = parameter.grad
    if parameter.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"NGD needs float32 or float64 parameters, got {parameter.dtype}: keep master weights in float32 and "
            "use torch.autocast for the forward pass."
        )
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError("NGD needs dense gradients, got sparse ones: use nn.Embedding(sparse=False).")


def _check(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        if not real(name, group[name]) >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}")
    if not real("alpha", group["alpha"]) >= 0:
        raise ValueError(f"alpha must not be negative, got {group['alpha']}; the paper uses 0.01 to 0.1, Kaldi 4")
    if not 0 < real("eta", group["eta"]) < 1:
        raise ValueError(f"eta is the weight of the newest gradient and lies between 0 and 1, got {group['eta']}")
    if not real("epsilon", group["epsilon"]) > 0 or not 0 < real("delta", group["delta"]) < 1:
        raise ValueError(f"epsilon must be positive, delta from 0 to 1, got {group['epsilon']}, {group['delta']}")
    whole("update_period", group["update_period"])
    if group["rank"] is not None:
        whole("rank", group["rank"], why="None chooses min((d + 1) // 2, 80) for each axis")
