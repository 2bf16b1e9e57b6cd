from __future__ import annotations

import json
from pathlib import Path

import pytest

from curvlab.lab.runs.provenance import Commit
from curvlab.lab.runs.record import read_record, recorded_units, sign


def test_who_judged_and_drew_stands_apart_from_who_computed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"assembled": {"commit": "aa", "clean": true}}')
    sign(tmp_path, "judged", Commit("bb", True))
    sign(tmp_path, "drawn", Commit("cc", False))
    assert read_record(tmp_path) == {
        "assembled": {"commit": "aa", "clean": True},
        "judged": {"commit": "bb", "clean": True},
        "drawn": {"commit": "cc", "clean": False},
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "missing: its run was stopped, or never made"),
        ("{", "damaged .*run the target again"),
        ("[]", "no keys"),
    ],
)
def test_missing_and_damaged_records_say_what_to_do(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_record(tmp_path)
    assert recorded_units(tmp_path) is None


def test_a_variation_expects_as_many_units_as_its_preset(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "run.json").write_text(json.dumps({"num_units": 7}))
    assert recorded_units(tmp_path / "laptop+seed=1") == 7
    assert recorded_units(tmp_path / "smoke") is None
