"""Convolutional networks without normalisation: a small one, LeNet-5, AlexNet and VGG-13 for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvlab.lab.models.mlp import activation_module


def image_shape(model: str, input_shape: Sequence[int], *, min_size: int) -> tuple[int, int, int]:
    """Return (C, H, W), or raise a ValueError when `input_shape` is no image of at least `min_size`."""
    if len(input_shape) != 3 or min(input_shape[1:]) < min_size:
        raise ValueError(
            f"{model} needs images (C, H, W) with H, W >= {min_size}, got input_shape={tuple(input_shape)}. "
            "Use model=mlp for tables, model=convnet for 8 x 8 images."
        )
    channels, height, width = input_shape
    return channels, height, width


class ConvNet(nn.Module):
    """Two 3 x 3 convolutions with 2 x 2 average pooling between them, then one linear layer.

    3,818 parameters for digits (1, 8, 8) and ten classes.

    Args:
        input_shape: (C, H, W), H and W at least 4.
        num_outputs: classes.
        channels: of the two convolutions.
        activation: relu, tanh or gelu.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        *,
        channels: Sequence[int] = (8, 16),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        in_channels, height, width = image_shape("ConvNet", input_shape, min_size=4)
        first, second = channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, first, 3, padding=1),
            activation_module(activation),
            nn.AvgPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            activation_module(activation),
            nn.Flatten(),
        )
        self.linear = nn.Linear(second * (height // 2) * (width // 2), num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, C, H, W) -> (B, num_outputs)."""
        return self.linear(self.features(inputs))


class LeNet5(nn.Module):
    """LeNet-5 (LeCun et al. 1998) as used today: full connections between maps, linear output layer.

    Two 5 x 5 convolutions of 6 and 16 maps, each followed by activation and 2 x 2 average pooling, then
    linear layers of 120 and 84. Images smaller than 32 x 32 are padded by 2, which brings MNIST's 28 x 28
    to the original size: 61,706 parameters for (1, 28, 28) and ten classes.

    Args:
        input_shape: (C, H, W), H and W at least 16.
        num_outputs: classes.
        activation: tanh as in the original, relu or gelu.
    """

    def __init__(self, input_shape: Sequence[int], num_outputs: int, *, activation: str = "tanh") -> None:
        super().__init__()
        channels, height, width = image_shape("LeNet5", input_shape, min_size=16)
        padding = 2 if min(height, width) < 32 else 0
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            activation_module(activation),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            activation_module(activation),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        sides = [((size + 2 * padding - 4) // 2 - 4) // 2 for size in (height, width)]
        self.classifier = nn.Sequential(
            nn.Linear(16 * sides[0] * sides[1], 120),
            activation_module(activation),
            nn.Linear(120, 84),
            activation_module(activation),
            nn.Linear(84, num_outputs),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, C, H, W) -> (B, num_outputs)."""
        return self.classifier(self.features(inputs))


class AlexNet(nn.Module):
    """AlexNet (Krizhevsky et al. 2012) with its five convolutions and three linear layers, for small images.

    As usual for 32 x 32, all kernels are 3 x 3 with stride 1, and 2 x 2 maxima are taken after the first, second
    and fifth. No dropout and no local response normalisation: an output depends on its own input alone.

    Args:
        input_shape: (C, H, W), H and W at least 8.
        num_outputs: classes.
        hidden_size: of the two hidden linear layers; 4096 in the original, for 224 x 224.
    """

    def __init__(self, input_shape: Sequence[int], num_outputs: int, *, hidden_size: int = 1024) -> None:
        super().__init__()
        channels, height, width = image_shape("AlexNet", input_shape, min_size=8)
        layers: list[nn.Module] = []
        for size, pooled in ((64, True), (192, True), (384, False), (256, False), (256, True)):
            layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pooled else []
            channels = size
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(channels * (height // 8) * (width // 8), hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, num_outputs),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, C, H, W) -> (B, num_outputs)."""
        return self.classifier(self.features(inputs))


STAGES = (64, 128, 256, 512, 512)  # channels; two convolutions each, configuration B


class VGG13(nn.Module):
    """VGG-13 (Simonyan & Zisserman 2014, configuration B), as published without BatchNorm, and a linear head.

    Five stages of two 3 x 3 convolutions, each followed by 2 x 2 maxima, then one linear layer, as usual for
    32 x 32; smaller images are padded with zeros to that size. Kaiming initialisation, without which ten layers
    without normalisation do not train.

    Args:
        input_shape: (C, H, W), H and W at least 16 and at most 32.
        num_outputs: classes.
    """

    def __init__(self, input_shape: Sequence[int], num_outputs: int) -> None:
        super().__init__()
        channels, height, width = image_shape("VGG13", input_shape, min_size=16)
        if max(height, width) > 32:
            raise ValueError(f"VGG13 here takes images of at most 32 x 32, got {height} x {width}: resize them")
        top, left = (32 - height) // 2, (32 - width) // 2
        layers: list[nn.Module] = [nn.ZeroPad2d((left, 32 - width - left, top, 32 - height - top))]
        for size in STAGES:
            for before in (channels, size):
                layers += [nn.Conv2d(before, size, 3, padding=1), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            channels = size
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.linear = nn.Linear(channels, num_outputs)
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, C, H, W) -> (B, num_outputs)."""
        return self.linear(self.features(inputs))
