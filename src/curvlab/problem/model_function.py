"""A model as a function of its trainable parameters, h(x; theta), and the checks that make it a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from curvlab.problem.batch import Inputs, take, without_graph
from curvlab.problem.parameters import by_every_name, checked_model


def check_mode(model: nn.Module) -> None:
    """Raise a ValueError at modules that are known to depend on chance or on a batch's other examples.

    What hides inside a forward (functional dropout, power iterations) is noticed by `deterministic` when it runs.
    """
    for module in model.modules():
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
def deterministic(model: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Raise a ValueError if the model's forward, called inside, draws random numbers or changes a buffer.

    Yields copies of the buffers to call it with, in train mode (else nothing: in eval mode they are constants), so
    that the model and the global generator are as before even where it raises. Cost: microseconds.
    """
    training = any(module.training for module in model.modules())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if training else {}
    versions = {name: buffer._version for name, buffer in buffers.items() if not buffer.is_inference()}
    before = _random_state(device)
    yield buffers
    after = _random_state(device)
    mode = "train" if training else "eval"
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        torch.set_rng_state(before[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(before[1], device)
        way_out = "call model.eval() first" if training else "its forward must not sample"
        raise ValueError(
            f"the model draws random numbers in {mode} mode, so its outputs depend on chance: {way_out}."
        )
    for name, version in versions.items():
        if buffers[name]._version != version:
            raise ValueError(
                f"the model changes its buffer '{name}' at each call in train mode, so it is no function of its "
                "parameters and one example: call model.eval() first."
            )


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def plain_lookups(model: nn.Module) -> Iterator[None]:
    """Set aside what changes derivatives of embeddings, in reverse mode only, and no outputs."""
    kinds = (nn.Embedding, ("padding_idx", "scale_grad_by_freq", "sparse")), (nn.EmbeddingBag, _OF_BAGS)
    own = [
        (m, {n: getattr(m, n) for n in names}) for m in model.modules() for k, names in kinds if isinstance(m, k)
    ]
    try:
        for module, settings in own:
            vars(module).update({name: None if name == "padding_idx" else False for name in settings})
        yield
    finally:
        for module, settings in own:
            vars(module).update(settings)


_OF_BAGS = ("scale_grad_by_freq", "sparse")  # padding_idx changes their outputs
# Of what PyTorch says where inputs do not fit a layer.
_SHAPES = (
    "cannot be multiplied",
    "size mismatch",
    "xpected",
    "out of range",
    "must match",
    "invalid for input of",
)


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
                    f"the model has no parameter '{name}' any more: build the operator anew"
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
        return tuple(without_graph(parameter) for parameter in self.live_parameters)

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
            self._has_head = _head(self.model) is not None and all(v.ndim == 2 for v in _values(inputs))
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
        check_mode(self.model)
        with (
            nullcontext() if fused else plain_attention(),
            nullcontext() if fused or not self.has_recurrence else _plain_recurrence(),
            plain_lookups(self.model),
            deterministic(self.model, self.device) as buffers,
        ):
            replaced = {**by_every_name(self.model, dict(zip(self.names, parameters, strict=True))), **buffers}
            positional, named = forward_arguments(self.model, inputs)
            try:
                with explained(self.model, inputs):
                    given = {**self._keywords, **named}
                    return functional_call(self.model, replaced, positional, given, tie_weights=False)
            except _HeadReachedError as end:
                return end.head_input


def forward_arguments(model: nn.Module, inputs: Inputs) -> tuple[tuple[Inputs, ...], dict[str, Any]]:
    """Return what the forward takes by position and by name; nn.Sequential takes one thing, by position."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(model, nn.Sequential):
        return ((next(iter(inputs.values())) if len(inputs) == 1 else inputs),), {}
    return (), dict(inputs)


@contextmanager
def explained(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Raise a forward's error about its inputs again, with what they are and what to pass."""
    try:
        yield
    except TypeError as error:
        if "argument" in str(error) and isinstance(inputs, Mapping) and not isinstance(model, nn.Sequential):
            raise TypeError(
                f"the forward of {type(model).__name__} does not fit the inputs {sorted(inputs)} ({error}): a "
                "mapping is handed over by name, so its names are the forward's arguments."
            ) from error
        if "argument" in str(error) and isinstance(inputs, Tensor) and "positional" in str(error):
            raise TypeError(
                f"the forward of {type(model).__name__} takes more than one input ({error}): pass a mapping by "
                "the names of its arguments, ({'u': u, 'v': v}, targets)."
            ) from error
        if not (isinstance(model, nn.Sequential) and isinstance(inputs, Mapping) and len(inputs) > 1):
            raise
        raise TypeError(
            f"nn.Sequential hands all of {sorted(inputs)} to its first module, as one mapping ({error}): "
            "wrap it in a module whose forward takes them by name, or pass one tensor."
        ) from error
    except (RuntimeError, ValueError, IndexError) as error:
        _refuse_not_functional(model, error)
        values = _values(inputs)
        kinds = {str(v.dtype) for v in values if not v.is_floating_point()}
        if kinds and "type" in str(error):
            raise TypeError(
                f"the inputs are {', '.join(sorted(kinds))}, and the model does not take them ({error}): pass "
                "inputs.float() where they are numbers, inputs.long() where they are tokens."
            ) from error
        if "same dtype" in str(error):
            raise ValueError(
                f"the model mixes dtypes ({error}): convert all of it, frozen parts and buffers too, with "
                "model.float() or model.double()."
            ) from error
        if isinstance(error, NotImplementedError) or not any(text in str(error) for text in _SHAPES):
            raise
        found = ", ".join(map(_described, values))
        raise ValueError(
            f"{type(model).__name__} does not take the inputs, {found} ({error}): pass them as model(inputs) "
            "takes a batch, its first axis the examples."
        ) from error


def _refuse_not_functional(model: nn.Module, error: Exception) -> None:
    """Raise again what torch.func says of a forward that it cannot differentiate."""
    for text, why in (
        ("saved tensor hooks", "checkpoints activations: turn that off, model.gradient_checkpointing_disable()"),
        ("setup_context", "has an autograd.Function of its own: give it setup_context and jvp"),
        ("mutate a captured Tensor", "writes into a tensor of its own, a buffer that counts say: leave that out"),
        ("doesn't have storage", "packs sequences, or reads numbers out of tensors: pass them padded, not packed"),
    ):
        if text in str(error):
            raise NotImplementedError(f"{type(model).__name__} {why} ({error})") from error


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


def _values(inputs: Inputs) -> list[Tensor]:
    return [inputs] if isinstance(inputs, Tensor) else list(inputs.values())


def _described(tensor: Tensor) -> str:
    ids = not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel() > 0
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" from {tensor.min()} to {tensor.max()}" if ids else "")


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
