"""A tiny checkout: the real conf/base.yaml, presets and trackers, and one toy target `toy/fig1`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from curvlab.lab.runs.configuration import Entry
from tests.warm import Warm

SOURCE = Path(__file__).resolve().parents[3]

CHOICES = """\
defaults:
  - /data: {data}
  - /solver: cg
num_train: {num_train}
"""

FILES = {
    "conf/toy/fig1.yaml": """\
# @package _global_
# make toy-fig1
defaults:
  - /base
  - /toy/fig1@_global_: ${preset}
  - _self_
damping: 1.0
""",
    "conf/toy/fig1/smoke.yaml": CHOICES.format(data="digits", num_train=2),
    "conf/toy/fig1/embedded.yaml": CHOICES.format(data="digits", num_train=5),
    "conf/toy/fig1/laptop.yaml": CHOICES.format(data="mnist", num_train=25),
    "conf/data/digits.yaml": "name: digits\nroot: ${oc.env:CURVLAB_DATA,data}\n",
    "conf/data/mnist.yaml": "name: mnist\nroot: ${oc.env:CURVLAB_DATA,data}\n",
    "conf/solver/cg.yaml": "_target_: builtins.dict\nrtol: 1.0e-3\nmax_steps: 10\n",
    "conf/solver/lissa.yaml": "_target_: builtins.dict\nstep_size: 0.1\n",
    "conf/model/mlp.yaml": "width: 3\n",
    "experiments/toy/fig1.py": """\
from pathlib import Path
from curvlab.lab.runs.configuration import Entry, main


def job(cfg):
    print(cfg.preset, cfg.data.name, cfg.num_train, cfg.seed, list(cfg.command.overrides))


if __name__ == "__main__":
    main(Entry("toy/fig1", Path("conf").absolute(), "toy-fig1"), job)
""",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the toy target; the process stands in it."""
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for part in ("preset", "tracker"):
        shutil.copytree(SOURCE / "conf" / part, root / "conf" / part)
    shutil.copy(SOURCE / "conf" / "base.yaml", root / "conf" / "base.yaml")
    monkeypatch.chdir(root)
    for variable in ("CURVLAB_DATA", "CURVLAB_STORE"):
        monkeypatch.delenv(variable, raising=False)
    return root


@pytest.fixture
def entry(checkout: Path) -> Entry:
    """What the toy target's command line is about."""
    return Entry("toy/fig1", checkout / "conf", "toy-fig1")


@pytest.fixture
def demo(checkout: Path, warm: Warm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run experiments/toy/fig1.py ARGS in a process: Hydra, loggers and trackers take over its output."""
    return lambda *arguments: warm.run("-m", "experiments.toy.fig1", *arguments, cwd=checkout)
