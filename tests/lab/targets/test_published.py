"""Published results: stale, computed again, gathered from sweeps; and sweeps on several machines."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import Claim, Criterion, Target, exact, judge
from curvlab.lab.claims import load_claims, save_claims
from curvlab.lab.claims.intervals import Interval
from curvlab.lab.tables import read_table
from curvlab.lab.targets import stale
from curvlab.lab.targets import verify as module
from curvlab.lab.targets.comparison import differences, fallen, other_tables
from curvlab.lab.targets.gather import as_read, drawn, gather
from curvlab.lab.targets.target import ROOT, UnknownTargetError, all_targets
from curvlab.lab.targets.verify import cheapest_part, judged_otherwise, verify
from tests.refusals import refuses

FILES = {
    "experiments/toy/fig1.py": "from typing import TYPE_CHECKING\nfrom curvlab.lab import Target\nimport json\n"
    "from curvlab.tools import solve\nfrom experiments.shared import stats\nif TYPE_CHECKING:\n"
    "    from curvlab.tools.plot import draw\n",
    "experiments/shared/stats.py": "from . import other\n",
    "experiments/shared/other.py": "",
    "src/curvlab/lab/__init__.py": "",
    "src/curvlab/lab/models/__init__.py": "from curvlab.lab.models.mlp import MLP\n",
    "src/curvlab/lab/models/mlp.py": "class MLP: ...\n",
    "src/curvlab/lab/runs/run.py": "from curvlab.tools.plot import draw\n",
    "src/curvlab/tools/__init__.py": "from .solver import solve\nfrom curvlab.tools.plot import draw\n",
    "src/curvlab/tools/solver.py": "def solve():\n    from curvlab.tools.deep import inner\n    return inner\n",
    "src/curvlab/tools/deep.py": "from curvlab.lab.runs.run import Run\ninner = 1\n",
    "src/curvlab/tools/plot.py": "draw = 2\n",
}
MADE_BY = [
    "experiments/shared/other.py",
    "experiments/shared/stats.py",
    "experiments/toy/fig1.py",
    "src/curvlab/lab/models/mlp.py",
    "src/curvlab/tools/deep.py",
    "src/curvlab/tools/solver.py",
]
CONFIG = {
    "tasks": {"a": {"model": {"_target_": "curvlab.lab.models.MLP", "width": 3}}, "b": [{"_target_": "x.Y"}]}
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("stale", "target"):
        monkeypatch.setattr(f"curvlab.lab.targets.{name}.ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (stale._changed_since, stale._imports, stale._tree, stale._file_of):
        cached.cache_clear()


@pytest.fixture
def commit(checkout: Path) -> Callable[[], str]:
    """Return a function that commits all there is, and gives the hash."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")

    def commit() -> str:
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "x")
        return git("rev-parse", "HEAD")

    return commit


TARGET = Target("experiments.toy.fig1", title="toy")


def test_a_result_is_made_by_what_its_target_imports_and_its_config_names(checkout: Path) -> None:
    # By way of a package's __init__ to where the name is defined; no bookkeeping, no types, no other packages.
    assert [path.relative_to(checkout).as_posix() for path in stale.made_by(TARGET, CONFIG)] == MADE_BY


@pytest.mark.parametrize("name", [*MADE_BY, "src/curvlab/tools/plot.py", "src/curvlab/lab/runs/run.py"])
def test_only_a_change_of_those_files_makes_it_stale(checkout: Path, commit: Callable[[], str], name: str) -> None:
    made = {"commit": commit(), "clean": True}
    record = {"units": [{"name": "toy/unit", "count": 3} | made], "assembled": made, "config": CONFIG}
    (checkout / name).write_text(FILES[name] + "other = 1\n")
    if name in MADE_BY:
        line = f"3 x toy/unit, its tables from {made['commit'][:8]}: {name}"
        assert stale.stale_parts(TARGET, record) == [line]
        record["assembled"] = {"commit": "0" * 40, "clean": False}
        unknown = "its tables from 00000000 with changes: git does not know this commit"
        assert stale.stale_parts(TARGET, record)[1] == unknown
    else:
        assert stale.stale_parts(TARGET, record) == []


def test_ends_of_an_interval_near_zero_have_room_by_its_width() -> None:
    before = pd.DataFrame({"x": [-1e-3, 2.0], "x_low": [-3e-3, 1.0], "x_high": [1e-5, 3.0], "y": [1e-5, 3.0]})
    assert not list(other_tables({"table": before}, {"table": before.assign(x_high=[1.2e-5, 3.0])}, rtol=2e-3))
    for column, value in (("x_high", 3e-5), ("y", 1.2e-5), ("x", -1.1e-3)):
        after = before.assign(**{column: [value, before[column][1]]})
        assert len(list(other_tables({"table": before}, {"table": after}, rtol=2e-3))) == 1


def test_stale_results_are_printed(
    checkout: Path, commit: Callable[[], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkout / "results/toy/fig1/embedded"
    folder.mkdir(parents=True)
    monkeypatch.setattr(stale, "published", lambda: [(TARGET, folder)])
    record = {"units": [], "assembled": {"commit": commit(), "clean": True}}
    (folder / "run.json").write_text(json.dumps(record))
    assert stale.print_stale() == 0
    assert capsys.readouterr().out.startswith("No published result is stale.\n")
    (checkout / "experiments/shared/stats.py").write_text("")
    forget()
    assert stale.print_stale() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == folder.as_posix()
    assert printed[1].startswith("  its tables from ")
    assert printed[2] == "1 stale result."


# ------------------------ What `make verify` calls a difference, on made-up result folders
VERIFY_TARGET = Target("experiments.rank1.fig1", title="toy", timings=("fits", "faster-*"))
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
    return list(differences(VERIFY_TARGET, committed, fill(tmp_path / "new" / name, table, **changes)))


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


def test_verdicts_and_tables_must_be_the_same_but_for_declared_timings(committed: Path, tmp_path: Path) -> None:
    (committed / "other.csv").write_text("x\n1\n")
    line, other = sorted(found(committed, tmp_path, value=2.0, speed=2.0))  # fits and timing differ, too
    assert other == "other.csv is only among the committed tables"
    assert line in ("claim small: reproduced -> refuted", "claim small: reproduced -> not reproduced")


@pytest.mark.parametrize(("value", "falls"), [(0.53, False), (0.57, True), (0.001, True), (None, True)])
def test_a_claim_stands_while_it_moves_by_a_small_share_of_its_interval(value: float | None, falls: bool) -> None:
    claim, interval = Claim("small", "s", "p", None, "m", Criterion(at_most=1.5)), Interval(0.0, 1.0, "t", 3)
    old, new = (judge(claim, v, None if v is None else interval, if_not_reproduced="-") for v in (0.5, value))
    assert list(fallen(VERIFY_TARGET, [old], [old])) == []
    assert bool(list(fallen(VERIFY_TARGET, [old], [new]))) == falls
    assert list(fallen(Target("experiments.rank1.fig1", title="toy", timings=("small",)), [old], [new])) == []


def test_of_a_variation_every_row_must_be_among_the_committed_rows_of_its_task(
    committed: Path, tmp_path: Path
) -> None:
    part = TABLE[1:]
    folder = fill(tmp_path / "new" / "embedded+task=b", part, value=9.0)  # no verdict is compared
    assert list(differences(VERIFY_TARGET, committed, folder)) == []
    part = part.assign(loss=[1.0, 2.0])
    lines = list(differences(VERIFY_TARGET, committed, fill(tmp_path / "other" / "embedded+task=b", part)))
    assert lines == [
        "table.csv: row 0 of a is not among the 2 committed rows of this task",
        "table.csv: row 1 of b is not among the 1 committed rows of this task",
    ]


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (2.0, 1)])
def test_the_command_prints_a_line_for_each_difference(
    committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, status: int
) -> None:
    def compute(targets: list[Target], overrides: list[str], own: dict[str, tuple[str, ...]]) -> int:
        assert own == {}
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


@pytest.mark.parametrize(
    ("key", "overrides", "columns"),
    [
        ("rank1/prop", (), ()),  # 32 s in all
        ("lissa/fig3", ("model_seeds=[0]",), ("model_seed",)),
        ("pbrf/tab8", ("task=mlp_128_128_concrete", "seeds=[0]"), ("task", "seed")),
        ("ginger/tab3", ("seeds=[0]",), ("seed",)),  # it has one task
    ],
)
def test_the_cheapest_part_of_a_large_preset(
    key: str, overrides: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    part = cheapest_part(all_targets()[key], "laptop", ROOT / "results" / key / "laptop")
    assert part == module.Part(overrides, columns)


def test_a_part_is_compared_row_by_row_in_the_tables_that_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = fill(tmp_path / "old" / "lissa" / "fig3" / "laptop", TABLE.rename(columns={"step": "model_seed"}))
    pd.DataFrame({"mean": [1.0]}).to_csv(committed / "means.csv", index=False)
    llc = committed.parents[2] / "benchmarks" / "llc" / "laptop"
    fill(llc, TABLE.drop(columns="task"))
    unit = {"name": "-", "seconds": 1e4}
    for folder in (committed, llc):
        (folder / "run.json").write_text(json.dumps({"units": [unit], "assembled": {"commit": "0" * 40}}))
    monkeypatch.setattr(module, "judged_otherwise", lambda target, folder: [])
    losses = [1e-12, 3.0]

    def compute(targets: list[Target], overrides: list[str], own: dict[str, tuple[str, ...]]) -> int:
        (target,) = targets
        assert own == {"lissa/fig3": ("model_seeds=[0]",)}
        (root,) = [Path(word.partition("=")[2]) for word in overrides if word.startswith("results.root=")]
        part = TABLE.rename(columns={"step": "model_seed"})[1:].assign(loss=[np.nan, losses.pop(0)])
        folder = fill(root / target.key / "laptop+model_seeds=[0]", part, value=9.0)
        pd.DataFrame({"mean": [2.0]}).to_csv(folder / "means.csv", index=False)
        return 0

    monkeypatch.setattr(module, "run_side_by_side", compute)
    for status in (0, 1):
        assert verify(["lissa-fig3", "bench-llc", "preset=laptop"], committed.parents[2]) == status
        printed = capsys.readouterr().out.splitlines()
        assert printed[:2] == [
            "lissa-fig3: model_seeds=[0]",
            "bench-llc: left out, no table of it says which task or seed its rows are of; `whole=true` computes "
            "all of it",
        ]
        row = "lissa-fig3: table.csv: row 1 of b is not among the 1 committed rows of this task"
        assert printed[2:-1] == [row] * status


def test_what_is_judged_again_must_be_what_is_committed(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (committed / "run.json").write_text("{}")
    results = load_claims(committed)
    monkeypatch.setattr("curvlab.lab.targets.execution.judged", lambda target, computed: results)
    assert list(judged_otherwise(VERIFY_TARGET, committed)) == []
    claim = replace(results[0].claim, statement="other words")
    results[:] = [replace(results[0], claim=claim, explanation="-")]
    assert list(judged_otherwise(VERIFY_TARGET, committed)) == [
        "judged again, claim faster-mlp has another claim, explanation, interval, value, verdict: "
        "`make judge` writes it",
        "judged again, claim small has another claim, explanation: `make judge` writes it",
    ]


# --------------------------------------------------- The tables of variations put together
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
    assert gather(["rank1-fig1", f"results.root={tmp_path}"]) == 0
    folder = tmp_path / "rank1" / "fig1" / "laptop" / "sweep"
    assert folder.as_posix() in capsys.readouterr().out
    table = read_table(folder, "table", dtype=str, keep_default_na=False)
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


def test_a_preset_may_be_named_and_other_overrides_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for preset in ("laptop", "embedded"):
        variation(tmp_path, preset, "rule=b", "step\n1\n")
    (variation(tmp_path, "embedded", "rule=c", "step\n1\n") / "run.json").unlink()
    line = ["rank1-fig1", "-m", "preset=laptop", f"results.root={tmp_path}"]
    assert gather(line) == 0
    said = capsys.readouterr()
    assert said.err == ""  # the other preset's unfinished one is not asked for
    assert (tmp_path / "rank1/fig1/laptop/sweep").exists()
    assert not (tmp_path / "rank1/fig1/embedded").exists()
    assert gather([*line, "rule=b,c"]) == 2
    assert "not rule=b,c: it puts together" in (said := capsys.readouterr().err)
    assert said.endswith(f"Write: gather rank1-fig1 preset=laptop results.root={tmp_path}\n")
    assert gather(["rank1-fig1", "preset=paper"], tmp_path) == 1
    assert "no finished variation of rank1-fig1 at preset paper" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("", "as the preset"),
        ("lissa.num_steps=5 lr=0.1", "num steps 5, lr 0.1"),
        ("sgd.lr=1 ngd.lr=2", "sgd lr 1, ngd lr 2"),
        ("model={a: 1, b: 2} seeds=[0,1]", "model {a: 1, b: 2}, seeds [0,1]"),
    ],
)
def test_a_setting_is_written_for_readers(setting: str, read: str) -> None:
    assert as_read(setting) == read


def test_the_picture_says_what_it_shows() -> None:
    row = {
        "claim": "agrees-mlp-8-digits-200",
        "statement": "It agrees (mlp-8-digits-200).",
        "value": 0.5,
        "low": 0.4,
    }
    row |= {"high": 0.6, "setting": "lissa.constant=2", "runs": 3, "at_least": 0.3, "at_most": float("nan")}
    drawing = drawn(pd.DataFrame([row]), "A title (preset smoke)")
    (ax,) = drawing.axes
    assert (drawing.get_suptitle(), ax.get_title(loc="left")) == ("A title (preset smoke)", row["statement"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["constant 2"]
    (legend,) = drawing.legends
    assert legend.get_title().get_text() == "each row a setting, mean over up to 3 seeds"
    assert {text.get_text() for text in legend.get_texts()} == {
        "bound that the claim needs",
        "value of the claim, interval",
    }


def test_unfinished_variations_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = variation(tmp_path, "laptop", "seed=1", "step\n1\n")
    (folder / "run.json").unlink()
    assert gather(["rank1-fig1"], tmp_path) == 1
    said = capsys.readouterr().err
    assert f"{folder.as_posix()}: left out" in said
    assert "no finished variation of rank1-fig1" in said
    assert not (tmp_path / "rank1" / "fig1" / "laptop").exists()


def test_a_name_is_asked_for_and_a_mistyped_one_refused(tmp_path: Path, capsys) -> None:
    refuses("rank1-fig1", gather, ["rank1-fig11"], tmp_path, error=UnknownTargetError)
    assert gather([]) == 1
    assert "name the target" in capsys.readouterr().err
