import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvlab.lab.reporting.page_image import MAX_LOSSLESS_BYTES, MAX_WIDTH, PageImage, embed_image, link_image


def decoded(image: PageImage) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(image.source.partition("base64,")[2]))).convert("RGB"))


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
    assert len(image.source) < path.stat().st_size / 5
    assert decoded(image).shape == (200, MAX_WIDTH, 3)


def test_link_is_relative_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "lissa" / "fig1").mkdir(parents=True)
    path = save(tmp_path / "lissa" / "fig1" / "figure.png", np.zeros((60, 1200, 3)))
    assert link_image(path, tmp_path) == PageImage("figure.png", "lissa/fig1/figure.png", 1200, 60)


@pytest.mark.parametrize("keep", [0, 0.5])
def test_damaged_figure_raises(tmp_path: Path, keep: float) -> None:
    path = save(tmp_path / "figure.png", np.random.default_rng(0).integers(0, 255, size=(60, 80, 3)))
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)] or b"no image")
    for read in (embed_image, lambda each: link_image(each, tmp_path)):
        with pytest.raises((OSError, SyntaxError), match=r"cannot identify|(?i:truncated)|broken PNG"):
            read(path)
