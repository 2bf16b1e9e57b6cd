"""Residual networks: the CIFAR ResNet-20 of He et al. (2016) and its last stage; torchvision's ResNet-18, -50."""

from __future__ import annotations

import hashlib
import pickle
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from curvlab.files import write_atomically
from curvlab.lab.data.download import line_of
from curvlab.lab.data.splits import DataSplits
from curvlab.lab.models.convolutional import image_shape

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


# ------------------------------------------------------------- the last stage on what the others make of images
def resnet20_last_stage(
    input_shape: Sequence[int], num_outputs: int, *, weights: str | Path | None = None
) -> nn.Module:
    """Return the third stage of `ResNet20`, width 16, and a new linear layer: 210,020 parameters, 100 classes.

    Args:
        input_shape: (32, H, W), as `through_resnet20` makes them; (32, 16, 16) from images of 32 x 32.
        num_outputs: classes.
        weights: as for `ResNet20`; its linear layer is left out.
    """
    channels, _, _ = image_shape("resnet20_last_stage", input_shape, min_size=2)
    if channels != 32:
        raise ValueError(f"the third stage takes 32 channels, got {channels}: make the data by through_resnet20")
    stage = ResNet20((3, 32, 32), 10, weights=weights).layer3
    head = nn.Linear(64, num_outputs)
    nn.init.kaiming_normal_(head.weight)
    return nn.Sequential(stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@torch.no_grad()
def through_resnet20(splits: DataSplits, *, weights: str | Path) -> DataSplits:
    """Return the splits with what two stages of the pretrained `ResNet20` make of the images, (32, H/2, W/2).

    Batch norm has its running statistics. So whoever trains the last stage alone pays for the others once.

    Args:
        splits: images (3, H, W) in memory, normalised by ImageNet's mean and std.
        weights: as for `ResNet20`.

    Cost: one forward pass over the images, about 0.1 TFLOP a thousand; 32 KiB for each of 32 x 32.
    """
    model = ResNet20(splits.input_shape, 10, weights=weights).eval()
    first = nn.Sequential(model.conv1, model.bn1, nn.ReLU(), model.layer1, model.layer2)

    def made_of(data: Any) -> TensorDataset:
        inputs, targets = data.tensors
        return TensorDataset(torch.cat([first(images) for images in inputs.split(250)]), targets)

    train, test = made_of(splits.train), made_of(splits.test)
    shape = tuple(train.tensors[0].shape[1:])
    pretrained = hashlib.sha256(Path(weights).read_bytes()).hexdigest()
    return replace(
        splits,
        name=f"{splits.name}_resnet20",
        train=train,
        test=test,
        input_shape=shape,
        checksum=hashlib.sha256(f"{splits.checksum} {pretrained}".encode()).hexdigest(),
        mean=(0.0,) * shape[0],
        std=(1.0,) * shape[0],
    )


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


# ---------------------------------------------------------------------------------- torchvision's
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
        raise FileNotFoundError(
            f"{name} weights {weights} are not in torch's hub cache, and the download failed: "
            f"{line_of(error, -1)}. Connect to the network, put the file into $TORCH_HOME/hub/checkpoints, or use "
            "model.weights=null."
        ) from None


def _with_cifar_stem(model: nn.Module) -> nn.Module:
    """Let the first convolution keep the size, and drop the pooling after it (as usual for CIFAR)."""
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    model.conv1, model.maxpool = first, nn.Identity()
    return model


# ------------------------------------------------------------------------------------ checkpoints
# Load a checkpoint safely: weights only, hash checked, shapes compared before anything is copied.
TIMEOUT_SECONDS = 15.0


def load_weights(model: nn.Module, path: Path, *, url: str | None = None) -> None:
    """Copy the checkpoint `path` into `model`, in place.

    The file holds a state dict, or {'state_dict': ...}; a prefix `module.` on its keys (from
    DataParallel) is dropped. When the name ends in a hash, as in `resnet20-12fca82f.th`, the file's sha256
    must start with it.

    Args:
        model: module to fill.
        path: checkpoint, read with `weights_only=True` onto the CPU.
        url: where to download it from when it is missing; None when it cannot be.

    Raises:
        FileNotFoundError: the file is missing and could not be downloaded.
        ValueError: the file is damaged, or belongs to another architecture.
    """
    if not path.is_file():
        _download(path, url)
    expected = re.search(r"-([0-9a-f]{8,})$", path.stem)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected and not actual.startswith(expected[1]):
        raise ValueError(
            f"'{path}' is damaged: its sha256 starts with {actual[:8]}, not with the {expected[1]} of its "
            "name. Delete it, then run again to download it, or copy it anew."
        )
    try:
        checkpoint: Any = torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
        raise ValueError(f"'{path}' is no readable checkpoint ({line_of(error)}): copy it anew") from error
    weights = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else checkpoint
    if not isinstance(weights, dict):
        raise ValueError(f"'{path}' holds a {type(weights).__name__}, not a state dict: copy it anew")
    other = next((key for key, value in weights.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise ValueError(
            f"'{path}' holds no state dict: {other} is no tensor. Save the model's state_dict() there."
        )
    weights = {key.removeprefix("module."): value for key, value in weights.items()}
    own = model.state_dict()
    # num_batches_tracked is missing in checkpoints from before torch 0.4.1, and changes nothing.
    weights = {name: own[name] for name in own if name.endswith("num_batches_tracked")} | weights
    for name in (*weights, *own):  # load_state_dict would copy what fits before it refuses the rest
        here, there = (tuple(of[name].shape) if name in of else None for of in (own, weights))
        if here != there:
            raise ValueError(
                f"'{path}' does not fit this {type(model).__name__}: {name} has shape {here} here and {there} "
                "there. Choose the data= it was trained on, or model.weights=null."
            )
    model.load_state_dict(weights, strict=True)


def _download(path: Path, url: str | None) -> None:
    reason = "."
    if url is not None:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                return write_atomically(path, response.read())
        except (OSError, HTTPException) as error:
            reason = f", and the download from {url} failed: {line_of(error)}."
    raise FileNotFoundError(
        f"pretrained weights not found: looked for '{path}'{reason} Put the file there, set CURVLAB_DATA or "
        "data.root to the folder that holds weights/, or start from random weights with model.weights=null."
    )
