"""Check of the image shape that a convolutional network is built for."""

from __future__ import annotations

from collections.abc import Sequence


def image_shape(model: str, input_shape: Sequence[int], *, min_size: int) -> tuple[int, int, int]:
    """Return (C, H, W), or raise a ValueError when `input_shape` is no image of at least `min_size`."""
    if len(input_shape) != 3 or min(input_shape[1:]) < min_size:
        raise ValueError(
            f"{model} needs images (C, H, W) with H, W >= {min_size}, got input_shape={tuple(input_shape)}. "
            "Use model=mlp for tables, model=convnet for 8 x 8 images."
        )
    channels, height, width = input_shape
    return channels, height, width
