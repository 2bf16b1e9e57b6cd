from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from curvlab.lab.runs.configuration import Entry, load_config
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.provenance import (
    Commit,
    Cost,
    check_seed,
    device_name,
    provenance,
    read_commit,
    torch_device,
)

UNIT = {"name": "toy/unit", "count": 5, "commit": "fedc", "clean": True}
COST = Cost(wall_seconds=1.23456, unit_seconds=60.0, num_matvecs=7, store_hits=2, store_misses=3)


def record(cfg: DictConfig, **notes: Any) -> dict[str, Any]:
    return provenance(
        cfg,
        key="toy/fig1",
        title="demo",
        assembled={"commit": "0123456789abcdef", "clean": True},
        units=[UNIT],
        num_units=5,
        settings=[{"name": "num_train", "ours": 3, "paper": 25}],
        cost=COST,
        data={"digits": "ab12"},
        notes=notes,
    )


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_record_says_how_to_make_it_again(entry: Entry) -> None:
    overrides = ["preset=laptop", "num_train=3", "tracker=none"]
    made = record(load_config(entry, overrides), reduced=["points"])
    assert made["command"] == 'make toy-fig1 PRESET=laptop ARGS="num_train=3"'
    assert made["python_command"] == "python -m experiments.toy.fig1 preset=laptop num_train=3"
    assert made["config"]["num_train"] == 3
    assert made["config"]["solver"] == {"_target_": "builtins.dict", "rtol": 1e-3, "max_steps": 10}
    assert "command" not in made["config"]
    assert (made["assembled"], made["seeds"]) == ({"commit": "0123456789abcdef", "clean": True}, [0])
    assert (made["units"], made["num_units"], made["target"], made["key"]) == ([UNIT], 5, "toy-fig1", "toy/fig1")
    assert made["settings"] == [{"name": "num_train", "ours": 3, "paper": 25}]
    assert (made["wall_seconds"], made["unit_seconds"], made["num_matvecs"]) == (1.235, 60.0, 7)
    assert made["store"] == {"hits": 2, "misses": 3}
    assert made["data"] == {"digits": "ab12"}
    assert made["reduced"] == ["points"]
    assert torch.__version__.startswith(made["versions"]["torch"])
    assert set(made["versions"]) == {"python", "curvlab", "torch", "torchvision", "numpy"}
    assert 10 * 2**20 < made["peak_memory_bytes"] < 2**40
    assert json.loads(json.dumps(made)) == made


def test_record_names_no_folder_and_no_user(checkout: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURVLAB_DATA", "/home/jane/data")
    overrides = [
        "store.root=/scratch/jane/store",
        "results.root=/home/jane/results",
        "tracker.entity=jane",
        "tracker.folder=/home/jane/outputs",
        "solver.rtol=/home/jane/rtol",
    ]
    made = record(load_config(entry, overrides), reduced=["see /home/jane/notes"])
    assert made["config"]["data"]["root"] == "<data root>"
    assert made["config"]["store"]["root"] == "<store root>"
    assert made["config"]["results"]["root"] == "<results root>"
    assert made["command"] == 'make toy-fig1 PRESET=embedded ARGS="solver.rtol=<path>"'
    text = json.dumps(made)
    assert "jane" not in text
    assert str(checkout) not in text
    assert re.search(r'"/|[ =]/\w', text.replace(made["device"], "")) is None


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


def test_without_git_or_repository_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_commit() == Commit("unknown", "unknown")
    monkeypatch.setenv("PATH", "")
    assert read_commit() == Commit("unknown", "unknown")


def test_device_names() -> None:
    assert torch_device("cpu") == torch.device("cpu")
    assert torch_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_name(torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="device=gpu is no device; use cpu, cuda, cuda:1 or auto"):
        torch_device("gpu")


def test_missing_gpu_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="device=cuda:1, but torch sees no GPU here; use device=cpu"):
        torch_device("cuda:1")


def test_a_seed_is_a_whole_number() -> None:
    check_seed(3)
    for seed in ("abc", 1.5, None, True):
        with pytest.raises(ValueError, match=rf"seed={seed} is no whole number; use seed=0"):
            check_seed(seed)
