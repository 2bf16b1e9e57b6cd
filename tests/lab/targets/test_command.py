"""The command line, and a new target laid out."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from curvlab.lab import Target, load_claims
from curvlab.lab.targets import command
from curvlab.lab.targets.command import _Schedule, run_side_by_side
from curvlab.lab.targets.new import lay_out
from tests.warm import Warm

ROOT = Path(__file__).parents[3]


def test_make_figures_says_what_its_published_units_took(capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "results").glob("*/*/embedded/run.json")]
    figures = [record for record in records if not record["key"].startswith("benchmarks")]
    units = {(unit["name"], unit["commit"], unit["seconds"]) for record in figures for unit in record["units"]}
    minutes = (sum(unit[2] for unit in units) + 4 * len(figures)) / 60
    targets = command.named_targets(["figures"])
    assert command.expected_seconds(targets, "embedded") / 60 == pytest.approx(minutes)
    assert command.expected_seconds(targets[:1] * 2, "embedded") < 2 * command.expected_seconds(
        targets[:1], "embedded"
    )
    told = re.search(r"`make figures` takes about\s+(\d+) minutes", (ROOT / "README.md").read_text())
    assert told is not None
    assert int(told[1]) == pytest.approx(minutes / 2, rel=0.15)  # on two cores


def test_help_tells_cpu_time_and_not_how_long_a_busy_machine_took() -> None:
    longer = 0
    for target in command.named_targets(["figures"]):
        record = json.loads((ROOT / "results" / target.key / "embedded" / "run.json").read_text())
        assert command.recorded_seconds(target, "embedded") == record["unit_seconds"]
        longer += record["wall_seconds"] > 2 * record["unit_seconds"] > 100
    assert longer  # where the two differ


def test_a_limit_that_torch_does_not_fit_into_is_named_in_one_line() -> None:
    run = f"ulimit -v 2000000; {sys.executable} -m experiments run rank1-prop preset=smoke"
    done = subprocess.run(["bash", "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .* limited to 1.9 GiB \(ulimit -v\).*raise the limit .*\n", done.stderr)


def test_targets_run_in_company_and_a_failure_stops_no_other(tmp_path: Path, warm: Warm) -> None:
    overrides = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}", "tracker=none"]
    # Only rank1-fig1 knows the key `deltas`: rank1-prop must fail, and say why, without harm to the other.
    command = ["run", "rank1-fig1", "rank1-prop", "preset=smoke", "deltas=[0.0]", *overrides]
    done = warm.run("-m", "experiments", *command, cwd=ROOT, env=os.environ | {"CURVLAB_JOBS": "2"})
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


# --- A target that is laid out runs, is listed, is judged, and is recorded in W&B with its numbers
def recorded_numbers(path: Path) -> dict[str, float]:
    """Return what a W&B file has logged, by its keys: protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(content):
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])  # after a checksum
        if kind == 0:  # the rest of a block of 32 KiB
            place += 32768 - place % 32768
            continue
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            for item in record.history.item:
                found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found


def test_a_target_that_is_laid_out_runs_with_all_that_others_have(
    toy: Path, experiments: Callable[..., Any]
) -> None:
    pytest.importorskip("wandb")
    done = experiments("run", "toy-fig1", "preset=smoke")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "toy-fig1 (smoke): results/toy/fig1/smoke\n"
    folder = toy / "results" / "toy" / "fig1" / "smoke"
    assert sorted(path.name for path in folder.iterdir()) == ["claims.json", "figure.png", "run.json", "table.csv"]
    (claim,) = load_claims(folder)
    record = json.loads((folder / "run.json").read_text())
    assert record["python_command"] == "python -m experiments run toy-fig1 preset=smoke"
    assert [(unit["name"], unit["count"]) for unit in record["units"]] == [("toy/fig1/draws", 3)]
    (recorded,) = (toy / "outputs" / "wandb").glob("offline-run-*/run-*.wandb")
    numbers = recorded_numbers(recorded)
    assert numbers["claim/centred/value"] == pytest.approx(claim.value)
    assert numbers["claim/centred/low"] == pytest.approx(claim.interval.low)
    assert numbers[f"verdicts/{claim.verdict}"] == 1
    assert numbers["cost/cpu_seconds"] == record["unit_seconds"]
    assert numbers["cost/peak_mib"] == record["peak_memory_bytes"] / 2**20
    assert numbers["cost/products"] == 0
    assert "  toy-fig1                 what it shows, in a line" in experiments("help").stdout


def test_what_is_there_is_not_overwritten(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (toy / "experiments" / "toy" / "fig1.py").read_text()
    (toy / "experiments" / "toy" / "fig1.py").write_text(text + "# mine\n")
    assert lay_out(["toy/fig1"], toy) == 1
    assert "experiments/toy/fig1.py is there already" in capsys.readouterr().err
    assert (toy / "experiments" / "toy" / "fig1.py").read_text().endswith("# mine\n")
    for wrong in ([], ["toy"], ["../toy/fig1"], ["toy/Fig1"], ["a/b", "c/d"]):
        assert lay_out(wrong, toy) == 2
