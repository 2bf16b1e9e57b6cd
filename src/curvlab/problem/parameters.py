"""Which parameters a curvature matrix refers to: frozen for good, or inside a block; models without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORMALIZATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def freeze(model: nn.Module, *, normalization: bool, biases: bool) -> int:
    """Set requires_grad to False, in place, and return how many parameters (P) still require gradients.

    Args:
        model: module; parameters that are frozen already stay frozen.
        normalization: freeze scale and shift of batch, instance, layer, group and RMS normalisation,
            also of other libraries' classes when their names end in LayerNorm or RMSNorm.
        biases: freeze all parameters whose name ends in "bias", normalisation's included.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (normalization and _is_normalization(module)) or (biases and name.endswith("bias")):
                parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _is_normalization(module: nn.Module) -> bool:
    return isinstance(module, NORMALIZATION) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


@contextmanager
def only_parameters(model: nn.Module, *patterns: str) -> Iterator[int]:
    """Let only parameters whose names match a pattern require gradients, inside; yield their number P.

        with only_parameters(model, "transformer.h.11.*", "*.ln_f.*"):
            op = GaussNewtonOperator(model, loss, data)   # (P, P); it keeps the choice after the block

    Operators and functions take the parameters that require gradients when they are built or called. Afterwards
    each parameter requires gradients as before. Parameters that match and were frozen are part of the choice.

    Args:
        model: any module; tied parameters have the first of their names, as in named_parameters().
        patterns: as of a shell: * stands for any characters, dots too, ? for one, [ab] for one of several.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            near = get_close_matches(pattern, named, n=3, cutoff=0.0)
            raise ValueError(f"no parameter's name matches '{pattern}': names are like {', '.join(near)}")
    if not patterns:
        raise ValueError("no pattern is given: nothing would be left to differentiate by")
    before = {name: parameter.requires_grad for name, parameter in named.items()}
    try:
        for name, parameter in named.items():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
        yield sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    finally:
        for name, parameter in named.items():
            parameter.requires_grad_(before[name])


def checked_model(model: object) -> nn.Module:
    """Return the model, or raise where it is no module, or has no values yet."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        got = f"class, {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"the model is a {got}: pass an nn.Module, an instance that has parameters")
    parameters = list(model.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        raise ValueError("the model has lazy parameters, without shapes: run a batch through it first")
    if any(parameter.is_complex() for parameter in parameters):
        raise ValueError("the model has complex parameters: write real and imaginary parts as two real ones")
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            "the model is on the meta device, where parameters have shapes but no values: load them "
            "first, with model.to_empty(device=...) and model.load_state_dict(...)"
        )
    return model
