from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab.runs import over_ranks
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.tracking import Tracker, start_tracker
from tests.warm import Warm

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
    tracker.log({{"loss": 0.5}})
    curves = pd.DataFrame({{"curve/a/llc": [1.0, 2.0, None]}}, index=[0, 5, 9])
    tracker.log_curves("x/epoch", curves)
    tracker.log_table("table", pd.DataFrame({{"x": [1.5, 2.5], "label": ["a", "b"]}}))
    tracker.log_figure("figure", Path("result/figure.png"))
    tracker.log_folder("toy-fig1-smoke+lr=1", Path("result"))
    tracker.finish("no luck" if job else "")
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
    tracker.finish("no luck")
    assert list(tmp_path.iterdir()) == []


def test_missing_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r'pip install "curvlab\[wandb\]", or .*tracker=none'):
        start(**WANDB)
    assert list(tmp_path.iterdir()) == []


def test_missing_trackio_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r'pip install "curvlab\[trackio\]", or .*tracker=none'):
        start(name="trackio", project="curvlab", folder="outputs")
    assert list(tmp_path.iterdir()) == []


def test_unknown_mode_and_tracker_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown tracker\.mode=onlin; use offline or online"):
        start(**WANDB | {"mode": "onlin"})
    with pytest.raises(ConfigurationError, match="unknown tracker 'mlflow'; use tracker=wandb, trackio or none"):
        start(name="mlflow")


def recorded(warm: Warm, tmp_path: Path, settings: dict[str, Any]) -> tuple[Path, Path]:
    """Record OFFLINE without an account, settings of the user's or a way to any network; return home and root."""
    home, root = tmp_path / "home", tmp_path / "root"
    (root / "result").mkdir(parents=True)
    home.mkdir()
    matplotlib.image.imsave(root / "result" / "figure.png", np.zeros((4, 4)))
    (root / "result" / "run.json").write_text("{}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "XDG"))}
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = warm.run(
        "-c", OFFLINE.format(settings=settings), cwd=root, env=environment | nowhere | {"HOME": str(home)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return home, root


def test_trackio_records_two_runs_without_a_network(warm: Warm, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    _, root = recorded(warm, tmp_path, {"name": "trackio", "project": "curvlab", "folder": "outputs"})
    with sqlite3.connect(root / "outputs" / "trackio" / "curvlab.db") as database:
        logged = [json.loads(row[0]) for row in database.execute("select metrics from metrics order by id")]
        configs = [json.loads(row[0]) for row in database.execute("select config from configs order by id")]
    assert [config["seed"] for config in configs] == [0, 1]
    assert {config["_Group"] for config in configs} == {"paper-x"}
    assert configs[0]["tags"] == ["smoke", "0123abcd"]
    numbers = [{"loss": 0.5}, {"x/epoch": 0.0, "curve/a/llc": 1.0}, {"x/epoch": 5.0, "curve/a/llc": 2.0}]
    assert logged[:3] == numbers
    assert [entry for entry in logged if "error" in entry] == [{"error": "no luck"}]
    assert sum("table" in entry for entry in logged) == sum("figure" in entry for entry in logged) == 2


def test_offline_runs_are_recorded_quietly_in_one_folder(warm: Warm, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    home, root = recorded(warm, tmp_path, WANDB)
    runs = sorted((root / "outputs" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    content = runs[0].read_bytes()
    for text in (b"paper-x", b"toy-fig1 smoke", b"0123abcd", b"loss", b"table-file", b"image-file"):
        assert text in content
    assert b"toy-fig1-smoke-lr-1" in content  # the artifact, under a name that W&B accepts
    assert sorted(path.name for path in root.iterdir()) == ["outputs", "result"]
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_other_ranks_than_the_first_show_and_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = OmegaConf.create({"progress": True, "tracker": {"name": "wandb"}, "seed": 3})
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", cfg), ("1", {"progress": False, "tracker": {"name": "none"}, "seed": 3})):
        monkeypatch.setenv("RANK", rank)
        assert over_ranks.quiet(cfg) == expected
    assert cfg.progress
