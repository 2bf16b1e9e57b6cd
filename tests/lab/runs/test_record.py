"""run.json, and what trackers are told."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from curvlab.lab.runs import over_ranks
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.record import (
    Commit,
    device_name,
    grouped,
    read_commit,
    read_record,
    recorded_units,
    sign,
    without_paths,
)
from curvlab.lab.runs.tracking import Tracker, start_tracker
from tests.refusals import refuses
from tests.warm import Warm


# --- run.json: what is written, what is read, and that it names nothing of the machine but its speed
def test_who_judged_and_drew_stands_apart_from_who_computed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"assembled": {"commit": "aa", "clean": true}}')
    sign(tmp_path, "judged", Commit("bb", True))
    sign(tmp_path, "drawn", Commit("cc", False))
    assert read_record(tmp_path) == {
        "assembled": {"commit": "aa", "clean": True},
        "judged": {"commit": "bb", "clean": True},
        "drawn": {"commit": "cc", "clean": False},
    }


def test_a_processor_whose_name_has_no_number_is_told_by_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("AMD EPYC", "AMD EPYC (family 26, model 2)"), ("Xeon 8488C", "Xeon 8488C")):
        text = f"processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {name}\n"
        monkeypatch.setattr(Path, "read_text", lambda path, encoding, text=text: text)
        assert device_name(torch.device("cpu")) == told


def test_missing_and_damaged_records_say_what_to_do(tmp_path: Path) -> None:
    refuses("missing: its run was stopped, or never made", read_record, tmp_path)
    for content, text in (("{", "damaged .*run the target again"), ("[]", "no keys")):
        (tmp_path / "run.json").write_text(content)
        refuses(text, read_record, tmp_path)
        assert recorded_units(tmp_path) is None


def test_a_variation_expects_as_many_units_as_its_preset(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "run.json").write_text(json.dumps({"num_units": 7}))
    assert recorded_units(tmp_path / "laptop+seed=1") == 7
    assert recorded_units(tmp_path / "smoke") is None


def test_units_are_together_where_all_but_their_sums_is_the_same() -> None:
    unit = {"name": "toy", "commit": "a", "seconds": 1.0, "num_matvecs": 2}
    other = unit | {"commit": "b"}
    twice = {"count": 2, "seconds": 2.0, "num_matvecs": 4}
    assert grouped([unit, other, unit]) == [unit | twice, other | {"count": 1}]


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_and_cleanliness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    assert read_commit() == Commit("unknown", "unknown")  # nothing committed yet
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    commit = read_commit()
    assert commit == Commit(git("rev-parse", "HEAD"), True)
    assert commit.short == commit.commit[:8]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1\n")
    assert read_commit().clean is True  # results are what is made, not what makes
    (tmp_path / "new.py").write_text("")
    assert read_commit().clean is False
    monkeypatch.chdir(tmp_path.parent)  # no repository, and no git
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parents[1]))
    assert read_commit() == Commit("unknown", "unknown")
    monkeypatch.setenv("PATH", "")
    assert read_commit() == Commit("unknown", "unknown")


def test_only_paths_of_the_machine_leave() -> None:
    leave = ["/mnt/My Disk/x", "../elsewhere", "~/x", "file:///home/jane/x"]
    within = ["python x.py data.file=/home/jane/x.csv seed=1", "a=[/home/jane/x,../y] b"]
    stay = [
        "results/lissa/fig1",
        "./data",
        "train/test, 1/2 and / or",
        "https://example.org/x/y",
        1,
        2.5,
        None,
        True,
    ]
    found = without_paths({"a": [*leave, *within, *stay]})["a"]
    assert found[:4] == ["<path>"] * 4
    assert found[4:] == ["python x.py data.file=<path> seed=1", "a=[<path>,<path>] b", *stay]


# --- Trackers
RUN = {"name": "toy-fig1 smoke", "group": "toy", "job_type": "toy-fig1", "tags": ["smoke"], "config": {"seed": 0}}
WANDB = {"name": "wandb", "mode": "offline", "project": "curvlab", "entity": None, "folder": "outputs"}
TRACKIO = {"name": "trackio", "project": "curvlab", "folder": "outputs"}

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


@pytest.mark.parametrize("settings", [WANDB, TRACKIO], ids=["wandb", "trackio"])
def test_a_missing_tracker_says_what_to_install(tmp_path: Path, monkeypatch, settings: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, settings["name"], None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.chdir(tmp_path)
    text = rf'pip install "curvlab\[{settings["name"]}\]", or .*tracker=none'
    refuses(text, start, **settings, error=ConfigurationError)
    assert list(tmp_path.iterdir()) == []


def test_unknown_mode_and_tracker_are_refused() -> None:
    refused = partial(refuses, error=ConfigurationError)
    refused(r"unknown tracker\.mode=onlin; use offline or online", start, **WANDB | {"mode": "onlin"})
    refused("unknown tracker 'mlflow'; use tracker=wandb, trackio or none", start, name="mlflow")


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
    _, root = recorded(warm, tmp_path, TRACKIO)
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
