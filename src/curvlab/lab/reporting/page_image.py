"""Figures on the results page: linked where they lie, or in the page itself as data URIs."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image

MAX_WIDTH = 1600  # pixels; sharp on a 2x screen at the page's width
MAX_LOSSLESS_BYTES = 150_000


@dataclass(frozen=True)
class PageImage:
    """An image of the page, with its size in pixels so that the page can leave room for it.

    Args:
        name: the file's name.
        source: where a browser finds it: a path relative to the page, or a data URI.
        width: in pixels.
        height: in pixels.
    """

    name: str
    source: str
    width: int
    height: int

    @property
    def is_wide(self) -> bool:
        """Whether it has too many panels side by side to be read at a phone's width."""
        return self.width > 1000


def link_image(path: Path, page_folder: Path) -> PageImage:
    """Return the image by its path relative to the page's folder, which must lie above it.

    Raises:
        OSError, ValueError, SyntaxError: the file is not a readable image; Pillow raises all three.
    """
    with Image.open(path) as file:
        width, height = file.size
        file.verify()  # checksums alone: nothing is decompressed
    return PageImage(path.name, path.relative_to(page_folder).as_posix(), width, height)


def embed_image(path: Path) -> PageImage:
    """Return the image as a WebP data URI, scaled down to `MAX_WIDTH`.

    Line plots stay lossless; what would be larger than `MAX_LOSSLESS_BYTES` (scatter clouds, photographs)
    is compressed with loss. The original stays beside the page.

    Raises:
        OSError, ValueError, SyntaxError: the file is not a readable image; Pillow raises all three.
    """
    with Image.open(path) as file:
        image = file.convert("RGB") if file.mode not in ("RGB", "RGBA") else file.copy()
    if image.width > MAX_WIDTH:
        height = max(1, round(image.height * MAX_WIDTH / image.width))
        image = image.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)
    data = _webp(image, lossless=True)
    if len(data) > MAX_LOSSLESS_BYTES:
        data = min(data, _webp(image, lossless=False), key=len)
    uri = f"data:image/webp;base64,{base64.b64encode(data).decode('ascii')}"
    return PageImage(path.name, uri, image.width, image.height)


def _webp(image: Image.Image, *, lossless: bool) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "WEBP", lossless=lossless, quality=82)
    return buffer.getvalue()
