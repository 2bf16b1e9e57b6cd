"""Choose which parameters a curvature matrix refers to."""

from __future__ import annotations

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
