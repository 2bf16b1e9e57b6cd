"""The CIFAR ResNet-20 of He et al. (2016), with the option to load pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from curvlab.lab.models.input_shape import image_shape
from curvlab.lab.models.pretrained import load_weights

# CIFAR-10, 91.7 % test accuracy (Idelbayev, BSD-2-Clause); the hash in the file's name is checked.
PRETRAINED_URL = (
    "https://github.com/akamaster/pytorch_resnet_cifar10/raw/master/pretrained_models/resnet20-12fca82f.th"
)


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the first convolution may halve the size."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, out_channels, H / stride, W / stride)."""
        outputs = functional.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs))
        return functional.relu(outputs + self._shortcut(inputs))

    def _shortcut(self, inputs: Tensor) -> Tensor:
        # Option A of the paper: subsample, and pad new channels with zeros on both sides; no parameters.
        if self.new_channels == 0 and self.stride == 1:
            return inputs
        half = self.new_channels // 2
        sampled = inputs[:, :, :: self.stride, :: self.stride]
        return functional.pad(sampled, (0, 0, 0, 0, half, self.new_channels - half))


class ResNet20(nn.Module):
    """ResNet-20 for small images: 3 stages of n = 3 blocks with w, 2w, 4w channels, option A shortcuts.

    w = 16: 269,722 parameters for (3, 32, 32) and ten classes; 268,336 without batch norm and biases.

    Args:
        input_shape: (C, H, W), H and W at least 8.
        num_outputs: classes.
        width: w, even.
        num_blocks: n of each stage; the network has 6n + 2 layers: ResNet-8 for 1.
        weights: checkpoint to load, e.g. `<data root>/weights/resnet20-12fca82f.th` (CIFAR-10, inputs
            normalised by ImageNet's mean and std), downloaded when missing; None for Kaiming initialisation.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        *,
        width: int = 16,
        num_blocks: int = 3,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width must be even and at least 2, got {width}: shortcuts pad both sides alike")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        channels, _, _ = image_shape("ResNet20", input_shape, min_size=8)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, num_blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, num_blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, num_blocks, stride=2)
        self.linear = nn.Linear(4 * width, num_outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        if weights is not None:
            path = Path(weights)
            url = PRETRAINED_URL if PRETRAINED_URL.endswith(f"/{path.name}") else None
            load_weights(self, path, url=url)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (B, C, H, W) -> (B, num_outputs)."""
        outputs = functional.relu(self.bn1(self.conv1(inputs)))
        outputs = self.layer3(self.layer2(self.layer1(outputs)))
        return self.linear(outputs.mean((2, 3)))


def _stage(in_channels: int, out_channels: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride=stride)
    others = [BasicBlock(out_channels, out_channels, stride=1) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *others)
