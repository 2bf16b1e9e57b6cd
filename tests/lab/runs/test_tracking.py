from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.tracking import Tracker, start_tracker

RUN = {"name": "toy-fig1 smoke", "group": "toy", "job_type": "toy-fig1", "tags": ["smoke"], "config": {"seed": 0}}
WANDB = {"name": "wandb", "mode": "offline", "project": "curvlab", "entity": None, "folder": "outputs"}

OFFLINE = """
import sys
from pathlib import Path
import pandas as pd
from omegaconf import OmegaConf
from curvlab.lab.runs.tracking import start_tracker
settings = OmegaConf.create({settings})
for job in range(2):  # as in a multirun: each job finishes its own
    tracker = start_tracker(
        settings, name="toy-fig1 smoke", group="paper-x", job_type="toy-fig1", tags=["smoke", "0123abcd"],
        config={{"seed": job}},
    )
    tracker.log({{"loss": 0.5}}, step=3)
    tracker.log_table("table", pd.DataFrame({{"x": [1.5, 2.5], "label": ["a", "b"]}}))
    tracker.log_figure("figure", Path("result/figure.png"))
    tracker.log_folder("toy-fig1-smoke+lr=1", Path("result"))
    tracker.finish(exit_code=job)
"""


def start(**settings: Any) -> Any:
    return start_tracker(OmegaConf.create(settings), **RUN)


def test_none_needs_no_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    monkeypatch.chdir(tmp_path)
    tracker = start(name="none")
    assert type(tracker) is Tracker
    tracker.log({"x": 1.0})
    tracker.log_table("table", pd.DataFrame())
    tracker.log_figure("figure", tmp_path)
    tracker.log_folder("folder", tmp_path)
    tracker.finish(exit_code=1)
    assert list(tmp_path.iterdir()) == []


def test_missing_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r'pip install "curvlab\[wandb\]", or .*tracker=none'):
        start(**WANDB)
    assert list(tmp_path.iterdir()) == []


def test_unknown_mode_and_tracker_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown tracker\.mode=onlin; use offline or online"):
        start(**WANDB | {"mode": "onlin"})
    with pytest.raises(ConfigurationError, match="unknown tracker 'mlflow'; use tracker=wandb or tracker=none"):
        start(name="mlflow")


def test_offline_runs_are_recorded_quietly_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    import matplotlib.image
    import numpy as np

    home, root = tmp_path / "home", tmp_path / "root"
    (root / "result").mkdir(parents=True)
    home.mkdir()
    matplotlib.image.imsave(root / "result" / "figure.png", np.zeros((4, 4)))
    (root / "result" / "run.json").write_text("{}")
    # No account, no settings of the user's, and no way to any network.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "XDG"))}
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE.format(settings=WANDB)],
        cwd=root,
        env=environment | nowhere | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    runs = sorted((root / "outputs" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    recorded = runs[0].read_bytes()
    for text in (b"paper-x", b"toy-fig1 smoke", b"0123abcd", b"loss", b"table-file", b"image-file"):
        assert text in recorded
    assert b"toy-fig1-smoke-lr-1" in recorded  # the artifact, under a name that W&B accepts
    assert sorted(path.name for path in root.iterdir()) == ["outputs", "result"]
    assert [path for path in home.rglob("*") if path.is_file()] == []
