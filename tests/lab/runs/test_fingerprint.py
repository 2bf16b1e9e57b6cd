"""A package written for the test: what counts as a change of the code behind a unit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from curvlab.lab.runs.fingerprint import (
    _file_of,
    _read,
    _tree,
    code_roots,
    fingerprint,
    function_name,
    reachable_code,
)

FILES = {
    "__init__.py": "from toycode.solver import solve\nfrom toycode.plot import draw\n",
    "compute.py": "from typing import TYPE_CHECKING\nfrom toycode import solve\nimport json\n"
    "if TYPE_CHECKING:\n    from toycode.plot import draw\n\ndef compute():\n    return solve()\n",
    "solver.py": '"""Solves."""\n\ndef solve():\n    """Return it."""\n    from toycode.deep import inner\n'
    "    return inner  # so\n",
    "deep.py": "inner = 1\n",
    "plot.py": "draw = 2\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write the package, with files changed, and return the fingerprint of its `compute`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**changed: str) -> str:
        for name, text in (FILES | {f"{stem}.py": text for stem, text in changed.items()}).items():
            path = tmp_path / "toycode" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for cache in (_file_of, _read, _tree):
            cache.cache_clear()
        return fingerprint(["toycode.compute"])

    return write


def test_all_that_a_module_can_reach_and_nothing_else(package: Callable[..., str]) -> None:
    package()
    # By way of the package's __init__ to where the name is defined; neither plot nor json.
    assert set(reachable_code(["toycode.compute"])) == {"toycode.compute", "toycode.solver", "toycode.deep"}
    assert "toycode.compute" not in sys.modules  # found without importing


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        ({"deep": "inner = 2\n"}, True),
        ({"solver": FILES["solver.py"].replace("return inner", "return -inner")}, True),
        (
            {"solver": FILES["solver.py"].replace("Return it", "Return it at once").replace("# so", "# or so")},
            False,
        ),
        ({"solver": FILES["solver.py"].replace("\n\n", "\n\n\n\n")}, False),
        ({"plot": "draw = 3\n"}, False),
        ({"__init__": FILES["__init__.py"] + "other = 1\n"}, False),
    ],
)
def test_code_matters_and_words_do_not(
    package: Callable[..., str], changed: dict[str, str], matters: bool
) -> None:
    assert (package() != package(**changed)) is matters


def test_roots_are_the_function_what_is_bound_to_it_and_targets() -> None:
    bound = partial(_compute, reachable_code, {"x": 1})
    config = {
        "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [3]},
        "parts": [{"_target_": "torch.nn.ReLU"}],
    }
    # Bookkeeping, curvlab.lab.runs itself, is left out.
    assert code_roots(bound, config) == ("curvlab.lab.models.mlp", __name__)
    assert function_name(bound) == f"{__name__}:_compute"


def test_bookkeeping_makes_no_numbers() -> None:
    assert not [name for name in reachable_code(["curvlab.training.train"]) if name.startswith("curvlab.lab.runs")]
    assert reachable_code(["curvlab.lab.runs.run"]) == {}


def test_a_module_without_a_file_is_named_as_such() -> None:
    assert reachable_code(["no_such_package.module"]) == {"no_such_package.module": "no source file"}


def _compute() -> None:
    """Do nothing."""
