"""A checkout with one target, `toy/fig1`, as `python -m experiments new` lays it out."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from curvlab.lab.targets.new import lay_out
from tests.warm import Warm

SOURCE = Path(__file__).resolve().parents[3]
Experiments = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """The checkout."""
    root = tmp_path / "checkout"
    for name in ("experiments/__main__.py", "experiments/papers/titles.txt", "conf/base.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / name, root / name)
    for name in ("conf/preset", "conf/tracker"):
        shutil.copytree(SOURCE / name, root / name)
    assert lay_out(["toy/fig1"], root) == 0
    return root


@pytest.fixture
def experiments(toy: Path, warm: Warm) -> Experiments:
    """Return a function that runs `python -m experiments ARGUMENTS` there."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "CURVLAB"))}
        own = {"PYTHONPATH": f"{toy}{os.pathsep}{SOURCE / 'src'}", "OMP_NUM_THREADS": "1"}
        return warm.run("-m", "experiments", *arguments, cwd=toy, env=clean | own | environment)

    return run
