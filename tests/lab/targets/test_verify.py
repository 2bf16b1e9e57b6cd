"""What `make verify` calls a difference, on made-up result folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import Claim, Criterion, Target, exact, judge
from curvlab.lab.reporting import load_claims, save_claims
from curvlab.lab.targets import verify as module
from curvlab.lab.targets.verify import differences, judged_otherwise, verify

TARGET = Target("experiments.rank1.fig1", title="toy", timings=("fits", "faster-*"))
TABLE = pd.DataFrame(
    {
        "task": ["a", "a", "b"],
        "step": [1, 2, 1],
        "loss": [0.5, np.nan, 1e-12],
        "outcome": ["done", None, "done"],
        "seconds_per_step": [1.0, 2.0, 3.0],
        "second_moment": [4.0, 5.0, 6.0],
    }
)


def fill(folder: Path, table: pd.DataFrame = TABLE, *, value: float = 1.0, speed: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    table.to_csv(folder / "table.csv", index=False)
    for name in ("timing", "fits"):
        pd.DataFrame({"x": [speed]}).to_csv(folder / f"{name}.csv", index=False)
    claims = [Claim(name, "s", "p", None, "m", Criterion(at_most=1.5)) for name in ("small", "faster-mlp")]
    values = (value, speed)
    save_claims(
        folder, [judge(c, v, exact(v), if_not_reproduced="-") for c, v in zip(claims, values, strict=True)]
    )
    return folder


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return fill(tmp_path / "old" / "rank1" / "fig1" / "embedded")


def found(committed: Path, tmp_path: Path, name: str = "embedded", **changes: object) -> list[str]:
    table = TABLE.copy()
    for column, value in changes.pop("table", {}).items():
        table.loc[0, column] = value
    return list(differences(TARGET, committed, fill(tmp_path / "new" / name, table, **changes)))


@pytest.mark.parametrize(
    ("column", "value", "line"),
    [
        ("loss", 0.5 * (1 + 9e-5), None),
        ("loss", 0.5 * (1 + 2e-4), "table.csv: loss: 1 of 3 differ, e.g. row 0: 0.5 -> 0.5001"),
        ("loss", np.nan, "table.csv: loss: 1 of 3 differ, e.g. row 0: 0.5 -> nan"),
        ("step", 3, "table.csv: step: 1 of 3 differ, e.g. row 0: 1 -> 3"),
        ("outcome", "failed", "table.csv: outcome: 1 of 3 differ, e.g. row 0: done -> failed"),
        ("second_moment", 9.0, "table.csv: second_moment: 1 of 3 differ, e.g. row 0: 4.0 -> 9.0"),
        ("seconds_per_step", 9.0, None),
        ("new", 1.0, "table.csv: 3 rows -> 3; columns only in one: new"),
    ],
)
def test_numbers_have_a_tolerance_text_has_none_and_timings_are_left_out(
    committed: Path, tmp_path: Path, column: str, value: object, line: str | None
) -> None:
    assert found(committed, tmp_path, table={column: value}) == ([] if line is None else [line])


def test_verdicts_must_be_the_same_but_for_declared_timings(committed: Path, tmp_path: Path) -> None:
    lines = found(committed, tmp_path, value=2.0, speed=2.0)  # fits and timing differ, too
    assert lines == ["claim small: reproduced -> refuted"] or lines == [
        "claim small: reproduced -> not reproduced"
    ]


def test_a_table_that_is_gone_or_new_is_named(committed: Path, tmp_path: Path) -> None:
    (committed / "other.csv").write_text("x\n1\n")
    assert found(committed, tmp_path) == ["other.csv is only among the committed tables"]


def test_of_a_variation_every_row_must_be_among_the_committed_rows_of_its_task(
    committed: Path, tmp_path: Path
) -> None:
    part = TABLE[1:]
    folder = fill(tmp_path / "new" / "embedded+task=b", part, value=9.0)  # no verdict is compared
    assert list(differences(TARGET, committed, folder)) == []
    part = part.assign(loss=[1.0, 2.0])
    lines = list(differences(TARGET, committed, fill(tmp_path / "other" / "embedded+task=b", part)))
    assert lines == [
        "table.csv: row 0 of a is not among the 2 committed rows of this task",
        "table.csv: row 1 of b is not among the 1 committed rows of this task",
    ]


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (2.0, 1)])
def test_the_command_prints_a_line_for_each_difference(
    committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, status: int
) -> None:
    def compute(targets: list[Target], overrides: list[str]) -> int:
        (root,) = [Path(word.partition("=")[2]) for word in overrides if word.startswith("results.root=")]
        assert {"preset=embedded", "tracker=none"} <= set(overrides)
        for target in targets:
            fill(root / target.key / "embedded", value=value)
        return 0

    monkeypatch.setattr(module, "run_side_by_side", compute)
    monkeypatch.setattr(module, "judged_otherwise", lambda target, folder: [])
    (committed / "run.json").write_text(
        json.dumps({"units": [], "assembled": {"commit": "0" * 40, "clean": True}})
    )
    assert verify(["rank1", "preset=embedded"], committed.parents[2]) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"1 targets (embedded): {'1 difference' if status else 'no differences'}"
    assert len(printed) == 1 + status
    assert not status or re.match("rank1-fig1: claim small: reproduced -> ", printed[0])
    assert verify(["rank1", "preset=embedded", "seconds=10"], committed.parents[2]) == status  # it is stale
    assert verify(["rank1-fig2", "preset=embedded"], committed.parents[2]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to compute: no embedded result among these targets"


def test_what_is_judged_again_must_be_what_is_committed(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (committed / "run.json").write_text("{}")
    results = load_claims(committed)
    monkeypatch.setattr("curvlab.lab.targets.execution.judged", lambda target, computed: results)
    assert list(judged_otherwise(TARGET, committed)) == []
    claim = replace(results[0].claim, statement="other words")
    results[:] = [replace(results[0], claim=claim, explanation="-")]
    assert list(judged_otherwise(TARGET, committed)) == [
        "judged again, claim faster-mlp has another claim, explanation, interval, value, verdict: "
        "`make judge` writes it",
        "judged again, claim small has another claim, explanation: `make judge` writes it",
    ]
