"""LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvlab.lab.models.activation import activation_module
from curvlab.lab.models.input_shape import image_shape


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
