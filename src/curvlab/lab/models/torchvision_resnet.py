"""ResNet-18 and ResNet-50 from torchvision, random or pretrained on ImageNet, or for images of 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from torch import nn

from curvlab.lab.models.input_shape import image_shape

Stem: TypeAlias = Literal["imagenet", "cifar"]


def resnet18(
    input_shape: Sequence[int], num_outputs: int, *, weights: str | None = None, stem: Stem = "imagenet"
) -> nn.Module:
    """Return torchvision's ResNet-18, 11,689,512 parameters with 1000 classes.

    Args:
        input_shape: (3, H, W).
        num_outputs: classes; 1000 with pretrained weights.
        weights: `IMAGENET1K_V1`, downloaded into torch's hub cache when missing, or None for random.
        stem: "imagenet": 7 x 7 convolution and pooling, which quarter height and width; "cifar": 3 x 3, which
            leaves them (11,220,132 parameters with 100 classes).
    """
    return _build("resnet18", input_shape, num_outputs, weights=weights, stem=stem)


def resnet50(
    input_shape: Sequence[int], num_outputs: int, *, weights: str | None = None, stem: Stem = "imagenet"
) -> nn.Module:
    """Return torchvision's ResNet-50, 25,557,032 parameters with 1000 classes; arguments as `resnet18`."""
    return _build("resnet50", input_shape, num_outputs, weights=weights, stem=stem)


def _build(
    name: str, input_shape: Sequence[int], num_outputs: int, *, weights: str | None, stem: Stem
) -> nn.Module:
    from torchvision import models  # not at the top: it brings in torch._dynamo, which takes seconds

    build: Any = getattr(models, name)
    channels, _, _ = image_shape(name, input_shape, min_size=32)
    if channels != 3:
        raise ValueError(f"{name} needs 3 channels, got input_shape={tuple(input_shape)}: choose another data=")
    if stem not in ("imagenet", "cifar"):
        raise ValueError(f"unknown stem {stem!r} for {name}: choose imagenet or cifar")
    if weights is None:
        model: nn.Module = build(weights=None, num_classes=num_outputs)
        return model if stem == "imagenet" else _with_cifar_stem(model)
    if stem != "imagenet":
        raise ValueError(f"{name} has pretrained weights for the stem 'imagenet' only: set model.weights=null")
    known = [choice.name for choice in models.get_model_weights(name)]
    if weights not in known:
        raise ValueError(f"unknown weights '{weights}' for {name}: choose one of {', '.join(known)}, or null")
    if num_outputs != 1000:
        raise ValueError(
            f"{name} weights {weights} are for 1000 classes, the data has {num_outputs}: use data=imagenet or "
            "data=imagenet_sample, or model.weights=null"
        )
    try:
        return build(weights=weights)
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise FileNotFoundError(
            f"{name} weights {weights} are not in torch's hub cache, and the download failed: {reason}. "
            "Connect to the network, put the file into $TORCH_HOME/hub/checkpoints, or use model.weights=null."
        ) from None


def _with_cifar_stem(model: nn.Module) -> nn.Module:
    """Let the first convolution keep the size, and drop the pooling after it (as usual for CIFAR)."""
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    model.conv1, model.maxpool = first, nn.Identity()
    return model
