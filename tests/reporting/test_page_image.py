import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvlab.reporting.embedding import MAX_LOSSLESS_BYTES, MAX_WIDTH, EmbeddedImage, embed_image


def decoded(image: EmbeddedImage) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(image.uri.partition("base64,")[2]))).convert("RGB"))


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def test_small_figure_stays_exact(tmp_path: Path) -> None:
    pixels = np.full((60, 80, 3), 255)
    pixels[20, :, 0] = 17
    image = embed_image(save(tmp_path / "figure.png", pixels))
    assert (image.name, image.width, image.height, image.is_wide) == ("figure.png", 80, 60, False)
    assert np.array_equal(decoded(image), pixels)


def test_large_figure_is_scaled_and_compressed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, size=(400, 2 * MAX_WIDTH, 3))
    path = save(tmp_path / "figure.png", noise)
    image = embed_image(path)
    assert (image.width, image.height, image.is_wide) == (MAX_WIDTH, 200, True)
    assert path.stat().st_size > MAX_LOSSLESS_BYTES
    assert len(image.uri) < path.stat().st_size / 5
    assert decoded(image).shape == (200, MAX_WIDTH, 3)


def test_damaged_figure_raises(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    path.write_bytes(b"no image")
    with pytest.raises(OSError, match="cannot identify image file"):
        embed_image(path)
