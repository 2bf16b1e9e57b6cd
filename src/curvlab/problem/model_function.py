"""A model as a function of its trainable parameters, h(x; theta), and the checks that make it a function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from curvlab.problem.batch import Inputs, explain, take, tensors_in
from curvlab.problem.parameters import checked_model

# A dictionary of a module, a key of it, and what stands there for the time of a call.
Swap: TypeAlias = tuple[dict[str, Any], str, Any]
_ABSENT = object()


def check_mode(model: nn.Module) -> bool:
    """Raise a ValueError at modules that are known to depend on chance or on a batch's other examples.

    What hides inside a forward (functional dropout, power iterations) is noticed by `ModelFunction` when it runs.
    Return whether any module is in train mode.
    """
    training = False
    for module in model.modules():
        training = training or module.training
        drops = isinstance(module, _DropoutNd) and module.p > 0
        # RReLU draws for values below 0 alone, so that `deterministic` may see nothing.
        slopes = isinstance(module, nn.RReLU) and module.lower < module.upper
        if module.training and (drops or slopes):
            _refuse(model, module, "makes the outputs depend on chance")
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            _refuse(model, module, "shortens rows of its weight at each call", "set its max_norm = None")
        # Without running statistics, batch norm uses those of the batch in eval mode too; instance norm is then
        # a function of single examples, and with them it updates them in train mode.
        elif isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            if not isinstance(module, _InstanceNorm):
                way_out = "call model.eval()" if module.training else "give it running statistics"
                _refuse(model, module, "makes the outputs depend on the whole batch", way_out)
            elif module.running_mean is not None:
                _refuse(model, module, "changes its running statistics at each call")
    return training


def _refuse(model: nn.Module, module: nn.Module, what: str, way_out: str = "call model.eval()") -> None:
    name = next(name for name, other in model.named_modules() if other is module)
    raise ValueError(
        f"module '{name}' ({type(module).__name__}) {what}: {way_out} first, so that the curvature is that of a "
        "function of single examples."
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode and each of them back into its own at the end."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def swapped(swaps: Iterable[Swap]) -> Iterator[None]:
    """Put things into modules' dictionaries, and back at the end what was there."""
    before: list[Swap] = []
    try:
        for place, key, value in swaps:
            before.append((place, key, place.get(key, _ABSENT)))
            place[key] = value
        yield
    finally:
        for place, key, value in before:
            if value is _ABSENT:  # a setting that the module's class has
                place.pop(key, None)
            else:
                place[key] = value


def tensor_swaps(model: nn.Module, values: Mapping[int, Tensor]) -> list[Swap]:
    """Return what puts values where the tensors of these ids are: everywhere, where weights are tied."""
    # Inside parametrize.cached() a layer would go on with the weight that it made of other values.
    swaps: list[Swap] = [(vars(parametrize), "_cache_enabled", 0)] if parametrize._cache_enabled else []
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if id(tensor) in values:
                    swaps.append((own, name, values[id(tensor)]))
    return swaps


def plain_lookups(model: nn.Module) -> list[Swap]:
    """Return what sets aside what changes derivatives of embeddings, in reverse mode only, and no outputs."""
    swaps: list[Swap] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            swaps += [(vars(module), "scale_grad_by_freq", False), (vars(module), "sparse", False)]
        if isinstance(module, nn.Embedding):  # a bag's padding_idx changes its outputs
            swaps.append((vars(module), "padding_idx", None))
    return swaps


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def without_graph(tensor: Tensor) -> Tensor:
    """Return the values without their graph; autograd accepts them even if they were made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


class NonFiniteOutputError(ValueError):
    """The model's outputs contain NaN or infinity."""


@dataclass(frozen=True)
class HeadInput:
    """What the last layer of a causal language model computes from: logits = hidden weightᵀ + bias.

    Attributes:
        hidden: (N, T, D).
        weight: (V, D); often the table of embeddings itself.
        bias: (V,), or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def logits(self, chosen: slice = slice(None)) -> Tensor:
        """Return the logits of some rows of `hidden`."""
        return nn.functional.linear(self.hidden[chosen], self.weight, self.bias)


class _HeadReachedError(Exception):
    """Ends a forward at the last layer; no error."""

    def __init__(self, head_input: HeadInput) -> None:
        super().__init__("the last layer was reached")
        self.head_input = head_input


class ModelFunction:
    """h(x; theta): outputs of `model` with its trainable parameters replaced by the given tensors.

    Parameters are those of `model.named_parameters()` that require gradients, in that order; tied weights
    appear once and are replaced everywhere. The model itself is never changed: no gradients are left in it,
    and its mode must already be `eval()` where that matters. During a call nn.Embedding ignores its padding_idx:
    that makes reverse mode drop the padding row's derivative, which forward mode keeps. Likewise
    scale_grad_by_freq, by which reverse mode divides by counts in the batch, and sparse.
    """

    def __init__(self, model: nn.Module) -> None:
        checked_model(model)
        if isinstance(model, nn.DataParallel):
            raise TypeError("the model is in nn.DataParallel: pass model.module, the module inside")
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError("the model is compiled by torch.jit: pass the module that it was made from")
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise ValueError("no parameter of the model requires gradients: there is nothing to differentiate by")
        self.model = model
        self.names = tuple(name for name, _ in named)
        self._shapes = tuple(parameter.shape for _, parameter in named)
        dtypes = {parameter.dtype for _, parameter in named}
        devices = {parameter.device for _, parameter in named}
        if len(dtypes) > 1 or len(devices) > 1:
            raise ValueError(
                f"trainable parameters must share one dtype and one device, got {sorted(map(str, dtypes))} "
                f"on {sorted(map(str, devices))}: convert the model with model.to(...)."
            )
        self.dtype = dtypes.pop()
        self.device = devices.pop()
        self.has_convolution = any(isinstance(module, _ConvNd) for module in model.modules())
        self.has_recurrence = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._has_lookups = bool(plain_lookups(model))
        self.num_parameters = sum(shape.numel() for shape in self._shapes)
        # Hugging Face language models return key-value caches by default: memory that nobody here reads.
        self._keywords = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
        self._has_head: bool | None = None
        self._maps: bool | None = None

    @property
    def live_parameters(self) -> tuple[nn.Parameter, ...]:
        """The model's own parameter objects, looked up by name: they may be replaced, not change in shape."""
        found = []
        for name, shape in zip(self.names, self._shapes, strict=True):
            try:
                parameter = self.model.get_parameter(name)
            except AttributeError as error:
                raise ValueError(
                    f"the model has no parameter '{name}' any more: build the operator anew. Or it is in use, by "
                    "another thread or its own forward: give each a copy, copy.deepcopy(model)."
                ) from error
            if (parameter.shape, parameter.dtype, parameter.device) != (shape, self.dtype, self.device):
                raise ValueError(
                    f"parameter '{name}' was {tuple(shape)} {self.dtype} on {self.device} and is now "
                    f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device}: build the operator after "
                    "the model is converted."
                )
            found.append(parameter)
        return tuple(found)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Each parameter's place in the flat vector."""
        ends = tuple(accumulate(shape.numel() for shape in self._shapes))
        return tuple(slice(start, end) for start, end in zip((0, *ends), ends, strict=False))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The current values, detached: theta changes when the model is trained further."""
        return tuple([p.clone() if p.is_inference() else p.detach() for p in self.live_parameters])

    def __call__(self, parameters: Sequence[Tensor], inputs: Inputs, *, fused: bool = False) -> Tensor:
        """Return h(x; parameters): logits (N, C), (N, T, V) or predictions. Cost: one forward.

        Args:
            parameters: the values.
            inputs: of a batch.
            fused: let attention run by the model's own kernels: they hold less, and have no forward mode.
        """
        return logits_of(self._run(parameters, inputs, fused=fused))

    @torch.no_grad()
    def own_loss(self, batch: Mapping[str, Tensor]) -> float | None:
        """Return `model(**batch).loss` for a batch that holds its labels; None where the model computes none."""
        loss = getattr(self._run(self.parameters, batch, fused=False), "loss", None)
        return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None

    @torch.no_grad()
    def maps(self, inputs: Inputs) -> bool:
        """Return whether `vmap` goes through the forward: not where that branches on values. Tried once."""
        if self._maps is None:
            twice = [value.expand(2, *value.shape) for value in self.parameters]
            one, has_head = take(inputs, slice(0, 1)), self.has_linear_head(inputs)
            try:  # of a language model without its logits, which would be the most that is held
                torch.vmap(lambda *own: self.head_input(own, one).hidden if has_head else self(own, one))(*twice)
            except (RuntimeError, ValueError, TypeError):
                self._maps = False
            else:
                self._maps = True
        return self._maps

    def has_linear_head(self, inputs: Inputs) -> bool:
        """Return whether the logits are a last linear layer's outputs, unchanged; tried once, on two tokens.

        True for OPT, GPT-2, Llama and Mistral. False for models that cap or scale their logits (Gemma 2, Cohere),
        and for those that do not name their last layer by Hugging Face's `get_output_embeddings`.
        """
        if self._has_head is None:
            self._has_head = _head(self.model) is not None and all(v.ndim == 2 for v in tensors_in((inputs,)))
            if self._has_head:
                with torch.no_grad():
                    two_tokens = take(inputs, (slice(0, 1), slice(0, 2)))
                    head = self.head_input(self.parameters, two_tokens)
                    self._has_head = torch.equal(head.logits(), self(self.parameters, two_tokens))
        return self._has_head

    @property
    def trains_head(self) -> bool:
        """Whether the last layer's weight is trained, be it a parameter of its own or tied to another."""
        layer = _head(self.model)
        # Not by requires_grad: the parameters are those that required gradients when this function was made.
        return layer is not None and any(layer.weight is parameter for parameter in self.live_parameters)

    def head_input(self, parameters: Sequence[Tensor], inputs: Inputs, *, fused: bool = False) -> HeadInput:
        """Return what the last layer reads, without computing any logits; where `has_linear_head`.

        `fused` as in a call.
        """
        layer = _head(self.model)
        if layer is None:
            raise TypeError(f"{type(self.model).__name__} has no last linear layer: ask has_linear_head first")

        def stop(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            # Read while the given parameters are in their places, also in those that are tied together.
            raise _HeadReachedError(HeadInput(arguments[0], layer.weight, layer.bias))

        hook = layer.register_forward_pre_hook(stop)
        try:
            reached = self._run(parameters, inputs, fused=fused)
        finally:
            hook.remove()
        if not isinstance(reached, HeadInput):
            raise ValueError(f"the model's last layer ({type(layer).__name__}) is not used by its forward")
        return reached

    def _run(self, parameters: Sequence[Tensor], inputs: Inputs, *, fused: bool) -> object:
        """Return what forward gives at these values, or raise where it draws random numbers or changes a buffer.

        In train mode forward sees copies of the buffers (in eval mode they are constants), so that the model and
        the global generator are as before even where it raises.
        """
        training, model, states = check_mode(self.model), self.model, _random_states(self.device)
        values = dict(zip(map(id, self.live_parameters), parameters, strict=True))
        copies = {id(buffer): buffer.clone() for buffer in model.buffers()} if training else {}
        # A parameter may stand among the buffers as well: it is the value given, and no copy.
        swaps = tensor_swaps(model, copies | values) + (plain_lookups(model) if self._has_lookups else [])
        with (
            nullcontext() if fused else plain_attention(),
            _plain_recurrence() if self.has_recurrence and not fused else nullcontext(),
            swapped(swaps),
        ):
            try:
                found = called(model, inputs, **self._keywords)
            except _HeadReachedError as end:
                found = end.head_input
        if not all(map(torch.equal, states, _random_states(self.device))):
            torch.set_rng_state(states[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(states[1], self.device)
            mode, way_out = (
                ("train", "call model.eval() first") if training else ("eval", "its forward must not sample")
            )
            raise ValueError(
                f"the model draws random numbers in {mode} mode, so its outputs depend on chance: {way_out}."
            )
        for name, buffer in model.named_buffers() if training else ():
            copy = copies.get(id(buffer))  # None where forward has just made the buffer
            if copy is not None and not copy.is_inference() and copy._version > 0:
                raise ValueError(
                    f"the model changes its buffer '{name}' at each call in train mode, so it is no function of "
                    "its parameters and one example: call model.eval() first."
                )
        return found


def called(model: nn.Module, inputs: Inputs, **keywords: Any) -> object:
    """Return what the model's forward gives; where it does not fit the inputs, the error says what to pass.

    A mapping is handed over by name, but nn.Sequential takes one thing, by position.
    """
    try:
        if isinstance(inputs, Tensor):
            return model(inputs, **keywords)
        if isinstance(model, nn.Sequential):
            return model(next(iter(inputs.values())) if len(inputs) == 1 else inputs)
        return model(**{**keywords, **inputs})
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        explain(model, inputs, error)
        raise


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention run by plain kernels: fused ones have no forward-mode and no second derivative."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Let LSTM and GRU run without oneDNN and cuDNN, whose kernels have no forward-mode derivative."""
    backends: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled = [backend.enabled for backend in backends]
    for backend in backends:
        backend.enabled = False
    try:
        yield
    finally:
        for backend, value in zip(backends, enabled, strict=True):
            backend.enabled = value


def check_finite(outputs: Tensor) -> None:
    """Raise NonFiniteOutputError if `outputs` contain NaN or infinity."""
    if not torch.isfinite(outputs).all():
        rows = (~torch.isfinite(outputs)).reshape(outputs.shape[0], -1).any(1).nonzero().flatten()[:5].tolist()
        raise NonFiniteOutputError(
            f"the model's outputs contain NaN or infinity (rows {rows} of a batch of {outputs.shape[0]}): "
            "check those inputs for NaN, and the parameters (a diverged training run leaves NaN weights)."
        )


def logits_of(outputs: object) -> Tensor:
    """Return what a forward gives: a tensor, or the `.logits` of a Hugging Face model's record."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returns {type(outputs).__name__}, neither a tensor nor an object with .logits: wrap it "
            "in a module whose forward returns the outputs that the loss takes."
        )
    return logits


def _head(model: nn.Module) -> nn.Linear | None:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    # Exactly nn.Linear: quantised and sharded ones have other products.
    return head if type(head) is nn.Linear else None
