"""A target that is laid out runs, is listed, is judged, and is recorded in W&B with its numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from curvlab.lab import load_claims
from curvlab.lab.targets.new import lay_out


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
