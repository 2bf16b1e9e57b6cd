"""VGG-13 for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvlab.lab.models.input_shape import image_shape

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
