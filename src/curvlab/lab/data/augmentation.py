"""Random changes of training images that leave their class alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cropped_and_flipped(images: Tensor, *, padding: int, generator: torch.Generator) -> Tensor:
    """Return each image padded with zeros, cut to its size at a random place, and mirrored every second time.

    The augmentation of He et al. (2016) for CIFAR, with padding 4 for 32 x 32 pixels. Zeros are the mean colour of
    normalised images.

    Args:
        images: (B, C, H, W).
        padding: pixels on each side, at least 0.
        generator: on the CPU; 3 B numbers are drawn.

    Cost: one pass over the images.
    """
    if images.ndim != 4:
        raise ValueError(f"only images (B, C, H, W) can be cropped and flipped, got shape {tuple(images.shape)}")
    count, _, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4)
    shifts = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = shifts[0] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = shifts[1] + torch.where(mirrored, columns.flip(1), columns)
    example = torch.arange(count)[:, None, None]
    places = (example, rows[:, :, None], columns[:, None, :])
    return padded.permute(0, 2, 3, 1)[tuple(place.to(images.device) for place in places)].permute(0, 3, 1, 2)
