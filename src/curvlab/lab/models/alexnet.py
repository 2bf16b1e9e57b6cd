"""AlexNet for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvlab.lab.models.input_shape import image_shape


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
