"""Networks in which an example's outputs depend on that example alone: group instead of batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from curvlab.lab.models.resnet20 import ResNet20

NUM_GROUPS = 8


def resnet20_group_norm(input_shape: Sequence[int], num_outputs: int, *, width: int = 16) -> nn.Module:
    """Return the CIFAR ResNet-20 with GroupNorm (Wu & He 2018) for BatchNorm, of the same size."""
    model = ResNet20(input_shape, num_outputs, width=width)
    replace_batch_norm(model)
    return model


def replace_batch_norm(model: nn.Module) -> None:
    """Put nn.GroupNorm in the place of each nn.BatchNorm2d, in `model` itself; scales start at 1, shifts at 0."""
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            groups = next(number for number in range(NUM_GROUPS, 0, -1) if channels % number == 0)
            setattr(model, name, nn.GroupNorm(groups, channels))
        else:
            replace_batch_norm(module)
