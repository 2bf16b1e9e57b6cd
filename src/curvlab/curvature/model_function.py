"""A model as a function of its trainable parameters, h(x; theta), and the checks that make it a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd

from curvlab.curvature.batch import Inputs, without_graph
from curvlab.curvature.function_check import check_mode, deterministic, without_padding


class NonFiniteOutputError(ValueError):
    """The model's outputs contain NaN or infinity."""


class ModelFunction:
    """h(x; theta): outputs of `model` with its trainable parameters replaced by the given tensors.

    Parameters are those of `model.named_parameters()` that require gradients, in that order; tied weights
    appear once and are replaced everywhere. The model itself is never changed: no gradients are left in it,
    and its mode must already be `eval()` where that matters. During a call nn.Embedding ignores its padding_idx:
    that makes reverse mode drop the padding row's derivative, which forward mode keeps.
    """

    def __init__(self, model: nn.Module) -> None:
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
        self.num_parameters = sum(shape.numel() for shape in self._shapes)
        self._keywords = {"use_cache": False} if _has_cache(model) else {}

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
    def parameters(self) -> tuple[Tensor, ...]:
        """The current values, detached: theta changes when the model is trained further."""
        return tuple(without_graph(parameter) for parameter in self.live_parameters)

    def __call__(self, parameters: Sequence[Tensor], inputs: Inputs) -> Tensor:
        """Return h(x; parameters): logits (N, C), (N, T, V) or predictions. Cost: one forward."""
        self.check_mode()
        replaced = dict(zip(self.names, parameters, strict=True))
        arguments: tuple[Tensor, ...] = ()
        keywords: Mapping[str, Tensor | bool] = self._keywords
        if isinstance(inputs, Mapping):
            keywords = {**self._keywords, **inputs}
        else:
            arguments = (inputs,)
        # Fused attention kernels have no forward-mode derivative; the paths made of plain kernels have one.
        with (
            sdpa_kernel(SDPBackend.MATH),
            _composite_attention(),
            without_padding(self.model),
            deterministic(self.model, self.device) as buffers,
        ):
            outputs = functional_call(self.model, replaced | buffers, arguments, dict(keywords))
        return _logits(outputs)

    def check_mode(self) -> None:
        """Raise a ValueError if outputs would depend on the other examples of a batch, or on chance."""
        check_mode(self.model)


@contextmanager
def _composite_attention() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def check_finite(outputs: Tensor) -> None:
    """Raise NonFiniteOutputError if `outputs` contain NaN or infinity."""
    if not torch.isfinite(outputs).all():
        rows = (~torch.isfinite(outputs)).reshape(outputs.shape[0], -1).any(1).nonzero().flatten()[:5].tolist()
        raise NonFiniteOutputError(
            f"the model's outputs contain NaN or infinity (rows {rows} of a batch of {outputs.shape[0]}): "
            "check those inputs for NaN, and the parameters (a diverged training run leaves NaN weights)."
        )


def _logits(outputs: object) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returns {type(outputs).__name__}, neither a tensor nor an object with .logits: wrap it "
            "in a module whose forward returns the outputs that the loss takes."
        )
    return logits


def _has_cache(model: nn.Module) -> bool:
    # Hugging Face language models return key-value caches by default: memory that nobody here reads.
    return hasattr(getattr(model, "config", None), "use_cache")
