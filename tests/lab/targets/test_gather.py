"""The tables of variations put together."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab.targets.gather import gather
from curvlab.lab.targets.target import UnknownTargetError


def variation(root: Path, preset: str, overrides: str, table: str) -> Path:
    folder = root / "rank1" / "fig1" / f"{preset}+{overrides.replace(' ', ',')}"
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text(table)
    record = {
        "python_command": f"python -m experiments.rank1.fig1 preset={preset} {overrides}",
        "assembled": {"commit": "0123456789abcdef"},
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_rows_carry_their_overrides_and_their_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = variation(tmp_path, "laptop", "+delta=0.10 seed=1", "step,value\n1,0.100\n2,nan\n")
    variation(tmp_path, "laptop", "rule=b", "step,value\n1,7\n")
    variation(tmp_path, "embedded", "step=3", "step,value\n1,5\n")
    assert gather(["rank1-fig1"], tmp_path) == 0
    folder = tmp_path / "rank1" / "fig1" / "laptop" / "sweep"
    assert folder.as_posix() in capsys.readouterr().out
    table = pd.read_csv(folder / "table.csv", dtype=str, keep_default_na=False)
    assert table.to_dict("list") == {
        "variation": [first.name, first.name, "laptop+rule=b"],
        "commit": ["01234567"] * 3,
        "delta": ["0.10", "0.10", ""],
        "seed": ["1", "1", ""],
        "step": ["1", "2", "1"],
        "value": ["0.100", "nan", "7"],
        "rule": ["", "", "b"],
    }
    other = pd.read_csv(tmp_path / "rank1" / "fig1" / "embedded" / "sweep" / "table.csv")
    assert other[["override step", "step"]].to_numpy().tolist() == [[3, 1]]  # the table has a step of its own


def test_unfinished_variations_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = variation(tmp_path, "laptop", "seed=1", "step\n1\n")
    (folder / "run.json").unlink()
    assert gather(["rank1-fig1"], tmp_path) == 1
    said = capsys.readouterr().err
    assert f"{folder.as_posix()}: left out" in said
    assert "no finished variation of rank1-fig1" in said
    assert not (tmp_path / "rank1" / "fig1" / "laptop").exists()


def test_a_mistyped_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTargetError, match="rank1-fig1"):
        gather(["rank1-fig11"], tmp_path)
