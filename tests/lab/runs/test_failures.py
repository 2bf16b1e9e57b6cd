"""Failures from outside end with one line that says what to change; unknown ones keep their traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from curvlab.lab.data.errors import damaged, not_found
from curvlab.lab.runs.failures import explanation, unwritable


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    return OmegaConf.create(
        {"results": {"root": str(tmp_path / "results")}, "store": {"root": str(tmp_path / "store")}}
    )


def test_folders_that_can_be_made_are_no_problem(cfg: DictConfig) -> None:
    assert unwritable(cfg) is None


@pytest.mark.parametrize("key", ["results.root", "store.root"])
def test_a_file_in_the_way_is_named_before_anything_runs(cfg: DictConfig, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    OmegaConf.update(cfg, key, str(tmp_path / "file" / "below"))
    problem = str(unwritable(cfg))
    assert f"{key}=" in problem
    assert "file' is no folder" in problem
    assert f"{key}=FOLDER" in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(cfg: DictConfig, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    cfg.results.root = str(closed / "results")
    assert "no permission" in str(unwritable(cfg))


def test_missing_and_damaged_data_show_through_what_wraps_them(cfg: DictConfig) -> None:
    for cause in (not_found("mnist", Path("data/MNIST")), damaged(Path("data/x"), "truncated")):
        wrapped = RuntimeError("Error in call to target 'curvlab.lab.data.mnist.load_mnist'")
        wrapped.__cause__ = cause
        assert explanation(wrapped, cfg) == str(cause)


def test_a_full_disk_is_said_with_what_to_change(cfg: DictConfig) -> None:
    line = str(explanation(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), cfg))  # as file.write raises it
    assert "No space left on device" in line
    assert "MiB free" in line
    assert "results.root=FOLDER" in line
    assert "\n" not in line
    assert "are kept" in line


def test_a_refused_write_names_the_root_it_belongs_to(cfg: DictConfig) -> None:
    path = Path(cfg.store.root) / "unit" / "x.pt"
    line = str(explanation(PermissionError(errno.EACCES, "Permission denied", str(path)), cfg))
    assert line.startswith("store.root=")
    assert "CURVLAB_STORE" in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake in the code"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/file"),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere/file"),
    ],
)
def test_other_errors_keep_their_traceback(cfg: DictConfig, error: Exception) -> None:
    assert explanation(error, cfg) is None


def test_the_command_line_ends_with_one_line_and_keeps_what_is_done(checkout: Path) -> None:
    (checkout / "file").write_text("")
    script = str(checkout / "experiments" / "toy" / "fig1.py")
    done = subprocess.run(
        [sys.executable, script, "preset=smoke", "tracker=none", "results.root=file/results"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: results.root=file/results cannot be written")
    assert "Traceback" not in done.stderr
    assert "HYDRA" not in done.stderr
    assert done.stderr.count("\n") == 1
