"""Where the real data sets and pretrained weights are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
