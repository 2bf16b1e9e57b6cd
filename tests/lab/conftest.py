"""Where the real data sets and pretrained weights are, and small files in the formats of published ones."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from curvlab.lab.data import download


@pytest.fixture
def data_root() -> Callable[..., Path]:
    """Return a function: the data root if it holds the given files or folders, else the test is skipped."""

    def require(*relative: str) -> Path:
        root = os.environ.get("CURVLAB_DATA")
        if root is None:
            pytest.skip("CURVLAB_DATA is not set")
        for wanted in relative:
            if not (Path(root) / wanted).exists():
                pytest.skip(f"CURVLAB_DATA holds no {wanted}")
        return Path(root)

    return require


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of one's own pass for published ones."""
    monkeypatch.setattr(download, "KNOWN", {})


@pytest.fixture
def mnist_root(tmp_path: Path, made_up: None) -> Path:
    """A data root with 5 + 3 images in MNIST's own format; pixel values count up from 0, 1, 2, ..."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", 5), ("t10k", 3)):
        pixels = (np.arange(count * 784) % 256).astype(np.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(9 - i for i in range(count))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)
    return tmp_path
