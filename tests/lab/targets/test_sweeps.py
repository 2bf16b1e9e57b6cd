"""Sweeps over processes and machines: Hydra's launchers, real processes, and the script that Slurm would get."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SWEEP = ("run", "toy-fig1", "-m", "preset=smoke", "tracker=none", "progress=false")


@pytest.fixture
def launchers() -> None:
    for name in ("joblib", "submitit"):
        pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="pip install 'curvlab[sweeps]'")


@pytest.mark.usefixtures("launchers")
@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_jobs_of_a_launcher_share_the_units_that_both_need(
    toy: Path, experiments: Callable[..., Any], launcher: str
) -> None:
    """Those of submitit are processes of their own: one that is killed stops no other, and is named at the end.

    joblib's single worker is this process, without its imports.
    """
    killed = launcher == "submitit_local"
    if killed:
        target = toy / "experiments" / "toy" / "fig1.py"
        dies = "    list(cfg.seeds) == [9] and __import__('os')._exit(9)\n"
        target.write_text(target.read_text().replace("    rows = [", f"{dies}    rows = ["))
    seeds, more = ("[9],[0,1,2],[1,2,3]", ()) if killed else ("[0,1,2],[1,2,3]", ("hydra.launcher.n_jobs=1",))
    done = experiments(*SWEEP, f"seeds={seeds}", f"hydra/launcher={launcher}", *more)
    assert done.returncode == killed, done.stderr
    if killed:
        assert "1 of the sweep's jobs failed:" in done.stderr
        named = r"  smoke seeds=\[9\]: job \d+ is \w+, see \S+log.err"
        assert re.fullmatch(named, done.stderr.splitlines()[-1])
    records = [json.loads(path.read_text()) for path in toy.rglob("run.json")]
    assert sorted(record["config"]["seeds"] for record in records) == [[0, 1, 2], [1, 2, 3]]
    # Nothing is computed twice: as many units are stored as were missing, fewer than the two jobs use.
    assert sum(record["store"]["misses"] for record in records) == 4
    assert len(list((toy / ".cache" / "store" / "toy").rglob("*.json"))) == 4
    assert sum(record["num_units"] for record in records) == 6


def test_a_sweep_killed_with_its_process_is_resumed_and_gather_names_what_it_lacks(
    toy: Path, experiments: Callable[..., Any]
) -> None:
    target = toy / "experiments" / "toy" / "fig1.py"
    whole = target.read_text()
    dies = "        seed == 4 and __import__('os').kill(__import__('os').getpid(), 9)\n"
    target.write_text(whole.replace("    numbers = ", f"{dies[4:]}    numbers = "))
    sweep = (*SWEEP, "seeds=[0,1],[3,4],[5,6]")
    assert experiments(*sweep).returncode == -signal.SIGKILL
    done = experiments("gather", "toy-fig1")
    assert "1 variations" in done.stdout
    named = re.findall(r"smoke\+seeds=_(\d,\d)_-\w+: left out, its run has not finished", done.stderr)
    assert named == ["3,4", "5,6"]  # what was at work, and what had not begun
    finished = {path: path.stat().st_mtime_ns for path in (toy / ".cache" / "store" / "toy").rglob("*.json")}
    assert len(finished) == 3  # of seeds 0, 1 and 3
    target.write_text(whole)
    assert experiments(*sweep).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # nothing is computed twice
    records = [json.loads(path.read_text()) for path in sorted(toy.rglob("run.json"))]
    assert [record["store"]["misses"] for record in records] == [2, 1, 2]
    done = experiments("gather", "toy-fig1")
    assert "3 variations" in done.stdout
    assert done.stderr == ""


@pytest.mark.usefixtures("launchers")
def test_slurm_gets_an_array_that_is_queued_again_when_its_time_is_up(
    tmp_path: Path, experiments: Callable[..., Any]
) -> None:
    """`sbatch` is one that keeps the script and refuses it: there is no cluster here."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/sh\nexit 1\n")
    (programs / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {tmp_path / "submitted.sh"}\necho refused >&2\nexit 1\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    queue = ["partition=gpu", "gpus_per_node=1", "timeout_min=240", "max_num_timeout=20", "array_parallelism=1"]
    done = experiments(
        *SWEEP,
        "num_draws=5,10",
        "hydra/launcher=submitit_slurm",
        *(f"hydra.launcher.{setting}" for setting in queue),
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
    )
    assert done.returncode != 0
    assert "refused" in done.stderr
    script = (tmp_path / "submitted.sh").read_text()
    directives = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"array=0-1%1", "time=240", "partition=gpu", "gpus-per-node=1", "job-name=toy-fig1"} <= directives
    assert any(line.startswith("signal=") for line in directives)  # so that submitit can queue it again
    assert f"{sys.executable} -u -m submitit.core._submit" in script.replace("'", "")
