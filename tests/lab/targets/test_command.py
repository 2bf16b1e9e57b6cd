"""Several targets in processes of their own, as `make figures` runs them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from curvlab.lab import Target
from curvlab.lab.targets import command
from curvlab.lab.targets.command import _Schedule, run_side_by_side

ROOT = Path(__file__).parents[3]


def test_targets_run_in_company_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    overrides = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}", "tracker=none"]
    done = subprocess.run(
        # Only rank1-fig1 knows this key: rank1-prop must fail, and say why, without harm to the other.
        [
            sys.executable,
            "-m",
            "experiments",
            "run",
            "rank1-fig1",
            "rank1-prop",
            "preset=smoke",
            "deltas=[0.0]",
            *overrides,
        ],
        cwd=ROOT,
        env=os.environ | {"CURVLAB_JOBS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "2 targets (smoke), 2 side by side; loading torch"
    assert any(line.startswith("[0 of 2 done] ") for line in lines)
    assert any(line.startswith("  rank1-fig1: done after ") for line in lines)
    assert any(line.startswith("  rank1-prop: FAILED (status 2; outputs/logs/rank1-prop.log)") for line in lines)
    assert lines[-1].startswith("1 of 2 targets in ")
    assert (
        "rank1-prop failed; the end of outputs/logs/rank1-prop.log:\n  error: unknown key 'deltas'" in done.stderr
    )
    assert [path.parent.parent.name for path in tmp_path.rglob("run.json")] == ["fig1"]


def test_a_target_waits_for_those_whose_units_it_reuses() -> None:
    first, second = (
        Target("experiments.toy.a", title="a"),
        Target("experiments.toy.b", title="b", after=("toy/a",)),
    )
    other = Target("experiments.toy.c", title="c", after=("toy/not-chosen",))
    schedule = _Schedule([second, first, other], [])
    order = []
    while (target := schedule._next()) is not None:
        schedule.waiting.remove(target)
        order.append(target.key)
    assert order == ["toy/a", "toy/b", "toy/c"]


def wait_for(log: Path) -> None:
    """Stand in for a target: write this process's number, and wait."""
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(60)


def run_waiting(log: Path) -> None:
    command.LOGS = log.parent
    command.load_libraries = lambda: None
    command.main = lambda target: wait_for(log)
    targets = [Target(f"experiments.toy.{name}", title=name) for name in "ab"]
    sys.exit(run_side_by_side(targets, []))


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_targets_end_with_the_process_that_runs_them(tmp_path: Path, how: int, status: int) -> None:
    log = tmp_path / "children"
    parent = multiprocessing.get_context("fork").Process(target=run_waiting, args=(log,))
    parent.start()
    assert until(lambda: log.exists() and len(log.read_text().split()) == 2)
    children = [int(number) for number in log.read_text().split()]
    os.kill(parent.pid, how)
    parent.join()
    assert parent.exitcode == status
    assert until(lambda: not any(is_running(child) for child in children))


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()
