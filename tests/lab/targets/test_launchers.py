"""Sweeps over processes and machines: Hydra's launchers, real processes, and the script that Slurm would get."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install 'curvlab[sweeps]'")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'curvlab[sweeps]'")
SWEEP = ("run", "toy-fig1", "-m", "preset=smoke", "tracker=none", "progress=false")


@pytest.mark.parametrize(
    "launcher", [["submitit_local"], ["joblib", "hydra.launcher.n_jobs=2"]], ids=["submitit_local", "joblib"]
)
def test_jobs_in_processes_of_their_own_share_the_units_that_both_need(
    toy: Path, experiments: Callable[..., Any], launcher: list[str]
) -> None:
    done = experiments(*SWEEP, "seeds=[0,1,2],[1,2,3]", f"hydra/launcher={launcher[0]}", *launcher[1:])
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in toy.rglob("run.json")]
    assert sorted(record["config"]["seeds"] for record in records) == [[0, 1, 2], [1, 2, 3]]
    # Nothing is computed twice: as many units are stored as were missing, fewer than the two jobs use.
    assert sum(record["store"]["misses"] for record in records) == 4
    assert len(list((toy / ".cache" / "store" / "toy").rglob("*.json"))) == 4
    assert sum(record["num_units"] for record in records) == 6


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
