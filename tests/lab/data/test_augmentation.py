"""Random crops and mirror images: every result is one of those that can be."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from curvlab.lab.data import cropped_and_flipped


def test_every_image_is_a_crop_of_the_padded_one_or_its_mirror_image() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 3, 4, 5, generator=generator)
    found = cropped_and_flipped(images, padding=1, generator=generator)
    assert found.shape == images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    places = set()
    for image, source in zip(found, padded, strict=True):
        crops = {
            (row, column): source[:, row : row + 4, column : column + 5] for row in range(3) for column in range(3)
        }
        fitting = {(place, False) for place, crop in crops.items() if torch.equal(image, crop)}
        fitting |= {(place, True) for place, crop in crops.items() if torch.equal(image, crop.flip(2))}
        assert len(fitting) == 1
        places |= fitting
    assert len(places) == 18  # all nine places, as they are and mirrored


def test_the_same_generator_gives_the_same_images() -> None:
    images = torch.rand(8, 1, 6, 6)
    first, second = (
        cropped_and_flipped(images, padding=2, generator=torch.Generator().manual_seed(3)) for _ in "12"
    )
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match=r"only images \(B, C, H, W\) .* got shape \(8, 6\)"):
        cropped_and_flipped(images[:, 0, 0], padding=1, generator=torch.Generator())
