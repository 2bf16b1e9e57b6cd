"""The examples in docstrings of linalg, spectrum, solvers and of the modules beside the layers run as printed."""

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = [*(SRC / "curvlab").glob("*.py")]
FILES += [path for room in ("linalg", "spectrum", "solvers") for path in (SRC / "curvlab" / room).rglob("*.py")]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts) for path in FILES if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run_as_printed(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
