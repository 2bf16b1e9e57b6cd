"""Small convolutional network for the 8 x 8 digits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvlab.lab.models.activation import activation_module
from curvlab.lab.models.input_shape import image_shape


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
