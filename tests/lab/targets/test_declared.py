"""Targets as they are declared, run, planned, and shown beside the paper's settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab import Computed, Target, all_targets, load_config, run_target, task_label, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.runs.record import Commit, read_record, write_record
from curvlab.lab.tables import as_written, read_table
from curvlab.lab.targets import execution
from curvlab.lab.targets.command import main
from curvlab.lab.targets.execution import curves_of, draw_again, judge_again
from curvlab.lab.targets.settings import MISSING, ours, settings_beside_the_paper
from curvlab.lab.targets.target import UnknownTargetError, named_targets, published, result_folders
from experiments.__main__ import main as run_command
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]


def run_quietly(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=check)


def make(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run make where nothing is installed yet: without site-packages."""
    base = f"PYTHON_BASE={sys.executable} -S -E"
    return run_quietly("make", "--no-print-directory", *arguments, base, check=check)


def test_names_of_one_target_and_of_groups() -> None:
    assert [target.key for target in named_targets(["ngd-fig6", "ngd/fig4"])] == ["ngd/fig6", "ngd/fig4"]
    ngd = [target.key for target in named_targets(["ngd"])]
    assert ngd == sorted(ngd)
    assert set(ngd) == {key for key in all_targets() if key.startswith("ngd/")}
    figures = {target.key for target in named_targets(["figures"])}
    assert figures == {key for key in all_targets() if not key.startswith("benchmarks/")}

    refuses("no target 'ngd-fgi6'; did you mean 'ngd-fig6'", named_targets, ["ngd-fgi6"], error=UnknownTargetError)


def test_help_needs_no_package_and_lists_every_target() -> None:
    done = run_quietly(sys.executable, "-S", "-E", "-m", "experiments", "help")
    for target in all_targets().values():
        assert f"  {target.make_name} " in done.stdout
        assert target.title in done.stdout


def test_make_takes_the_first_python_that_fits_and_says_when_there_is_none(tmp_path: Path) -> None:
    for tool in ("sh", "grep", "sed", "sort", "touch"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    for broken in ("python3.11", "python3.12"):  # as pyenv leaves them where another version is chosen
        (tmp_path / broken).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / broken).chmod(0o755)
    command, path = [shutil.which("make"), "-n", "-W", "pyproject.toml", "setup"], {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=path)
    assert done.stderr.endswith("no Python 3.11 to 3.13 found.  Stop.\n")
    (tmp_path / "python3.13").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3.13").chmod(0o755)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=path)
    assert done.stdout.startswith("python3.13 -m venv .venv\n")


def test_sync_says_when_there_is_nothing_to_send(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    wandb = tmp_path / ".venv" / "bin" / "wandb"
    wandb.parent.mkdir(parents=True)
    wandb.write_text('#!/bin/sh\necho "$@"\n')
    wandb.chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()

    def sync() -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "sync", f"PYTHON_BASE={sys.executable}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "error: outputs/wandb holds no run that was recorded offline" in sync().stderr
    (tmp_path / "outputs" / "wandb" / "offline-run-1").mkdir(parents=True)
    assert sync().stdout == "sync outputs/wandb/offline-run-1\n"


def test_make_names_the_nearest_without_any_package() -> None:
    done = make("lisa-fig1", check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("error: no target 'lisa-fig1'; did you mean 'lissa-fig1'?")
    assert "Traceback" not in done.stderr


def test_help_of_a_target_runs_nothing_and_a_dry_run_of_all_neither() -> None:
    assert make("help", "lissa-fig1").stdout.startswith(all_targets()["lissa/fig1"].description)
    printed = make("-n", "help", "lissa-fig1").stdout
    assert "experiments run" not in printed
    assert "experiments help lissa-fig1" in printed
    assert "experiments run figures" in make("-n", "figures").stdout  # not run: a line with $(MAKE) would be


def test_help_of_targets_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "lissa-fig1", "ngd/fig6"]) == 0
    printed = capsys.readouterr().out
    assert [all_targets()[key].description in printed for key in ("lissa/fig1", "ngd/fig6")] == [True, True]
    for mistyped in ("ngd-fgi6", "ngdfig6"):  # the name that `make` knows
        assert run_command(["help", mistyped]) == 2
        assert "did you mean 'ngd-fig6'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "judge", "draw", "verify", "stale", "gather", "new", "help"])
def test_every_command_has_help_and_run_wants_a_target(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "--help"]) == 0
    assert "judge [TARGET ...]" in capsys.readouterr().out
    for words in ([], ["seed=3"], ["-m"]):
        assert run_command(["run", *words]) == 2
        assert capsys.readouterr().err.startswith("error: name a target: run lissa-fig1")


def test_help_of_a_target_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from experiments.__main__ import main; main(['run', 'ngd-fig6', '--cfg', 'job'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    run_quietly(sys.executable, "-c", code)


def test_makefile_names_are_the_targets() -> None:
    done = run_quietly("make", "--no-print-directory", "-np", "help", check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TARGETS := ")]
    assert "$" in line or set(line.split()[2:]) == {target.make_name for target in all_targets().values()}
    listed = {line.partition(":")[0] for line in done.stdout.splitlines() if ":" in line}
    assert {target.make_name for target in all_targets().values()} <= listed


def test_help_of_a_target_says_what_it_computes_and_what_its_keys_mean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fig6", "--help"])
    target = all_targets()["ngd/fig6"]
    main(target)
    printed = capsys.readouterr().out
    assert printed.startswith(target.description)
    keys = (ROOT / "conf" / f"{target.key}.yaml").read_text().split("\n\n", 1)[1].strip()
    assert "#" in keys  # what they mean
    assert keys in printed
    assert all(re.search(rf"\n  {preset}\b", printed) for preset in ("smoke", "embedded", "laptop", "paper"))
    assert "lissa" not in printed


@pytest.mark.parametrize("arguments", [["help"], ["run", "lissa-fig1", "--help"]])
def test_help_ends_quietly_when_its_reader_leaves(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "experiments", *arguments],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------- Judging and drawing from files alone
KEY = "rank1/fig1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A result folder <root>/rank1/fig1/embedded, at smoke scale."""
    root = tmp_path_factory.mktemp("again")
    folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
    cfg = load_config(all_targets()[KEY], ["preset=smoke", "tracker=none", "progress=false", *folders])
    folder = run_target(all_targets()[KEY], cfg)
    return folder.rename(folder.with_name("embedded"))


@pytest.fixture
def result(made: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "results" / KEY / "embedded"
    shutil.copytree(made, folder)
    return folder


def test_judging_and_drawing_give_the_same_again(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    for path in result.iterdir():
        if path.suffix == ".png" or path.name == "claims.json":
            path.unlink()
    monkeypatch.setattr("curvlab.lab.runs.run.Run.unit", None)  # nothing is computed
    assert judge_again([str(result)]) == 0
    assert draw_again([str(result)]) == 0
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before


@pytest.mark.parametrize(
    ("act", "again", "write"), [("judged", judge_again, "save_claims"), ("drawn", draw_again, "write_png")]
)
def test_a_kill_between_writing_and_signing_leaves_it_unsigned_and_the_next_signs(
    result: Path, monkeypatch: pytest.MonkeyPatch, act: str, again: Callable[..., int], write: str
) -> None:
    signed = read_record(result)[act]
    with monkeypatch.context() as patch:
        patch.setattr(f"curvlab.lab.targets.execution.{write}", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            again([str(result)])
    assert read_record(result)[act] is None
    assert again([str(result)]) == 0
    assert read_record(result)[act] == signed


@pytest.mark.parametrize(("act", "again"), [("judged", judge_again), ("drawn", draw_again)])
def test_a_signature_of_a_tree_with_changes_is_renewed_by_one_without(
    result: Path, monkeypatch: pytest.MonkeyPatch, act: str, again: Callable[..., int]
) -> None:
    for clean, commit in ((False, "a"), (False, "b"), (True, "c"), (True, "d"), (False, "e")):
        monkeypatch.setattr("curvlab.lab.targets.execution.read_commit", partial(Commit, commit, clean))
        if commit == "a":
            write_record(result, read_record(result) | {act: {"commit": "a", "clean": False}})
        assert again([str(result)]) == 0
        kept = "a" if commit in "ab" else "c"
        assert read_record(result)[act] == {"commit": kept, "clean": kept == "c"}


def test_verdicts_follow_the_tables(result: Path) -> None:
    verdicts = [claim.verdict for claim in load_claims(result)]
    for path in result.glob("*.csv"):
        table = pd.read_csv(path)
        numbers = table.select_dtypes("float").columns
        table[numbers] = 1e9
        table.to_csv(path, index=False)
    assert judge_again([str(result)]) == 0
    assert [claim.verdict for claim in load_claims(result)] != verdicts


def test_a_damaged_folder_is_named_and_the_others_go_on(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = result.with_name("laptop")
    shutil.copytree(result, other)
    (result / "summary.csv").unlink()
    assert judge_again([str(result), str(other)]) == 1
    printed = capsys.readouterr()
    assert "cannot judge it" in printed.err
    assert "has no summary.csv" in printed.err
    assert printed.out == f"{other.as_posix()}\n"


def test_results_are_found_by_name_and_path(result: Path) -> None:
    root = result.parents[2]
    for preset in ("smoke", "embedded+seed=1"):
        shutil.copytree(result, result.with_name(preset))
    found = [folder.name for _, folder in result_folders(["rank1-fig1"], root)]
    assert found == ["embedded", "embedded+seed=1", "smoke"]
    assert [(target.key, folder) for target, folder in published(root)] == [(KEY, result)]


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory, run_smoke: Callable[..., Path]) -> Path:
    """The published result, judged and drawn by the code as it is now; `run_smoke` keeps pictures small."""
    folder = tmp_path_factory.mktemp("published") / KEY / "embedded"
    shutil.copytree(ROOT / "results" / KEY / "embedded", folder)
    for again in (judge_again, draw_again):
        assert again([str(folder)]) == 0
    return folder


SIXTY = '"num_steps", "ours": 60'


def test_judging_tells_the_papers_settings_again(as_published: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(as_published, tmp_path / KEY / "embedded")
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace(SIXTY, SIXTY.replace("60", "61")))
    assert (folder / "run.json").read_text() != text
    assert judge_again([str(folder)]) == 0
    assert (folder / "run.json").read_text() == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "equal to the published result: kept"),
        (("table.csv", "gap", 1 + 1e-3), "equal to the published result: kept"),  # another processor's rounding
        (("table.csv", "gap", 1 + 5e-3), "another result than the published one: table.csv: gap: "),
        (("run.json", '"title": "Uniform', '"title": "uniform'), "published one: other title\n"),
        (("run.json", SIXTY, SIXTY.replace("60", "61")), ": other settings\n"),
    ],
    ids=["same", "rounding", "table", "title", "setting"],
)
def test_a_result_that_comes_out_as_published_is_left_as_it_was(
    as_published: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str, object] | None,
    said: str,
) -> None:
    """The published tables were computed on another machine."""
    folder = shutil.copytree(as_published, tmp_path / "results" / KEY / "embedded")
    if change is not None and change[0] == "table.csv":
        table = read_table(folder, "table")
        table[change[1]] *= change[2]
        table.to_csv(folder / "table.csv.bz2", index=False)
    elif change is not None:
        text = (folder / change[0]).read_text()
        assert str(change[1]) in text
        (folder / change[0]).write_text(text.replace(str(change[1]), str(change[2])))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folders = [
        f"results.root={tmp_path / 'results'}",
        f"store.root={as_published.parent / 'store'}",
    ]  # one for all
    target, kept = all_targets()[KEY], said.endswith("kept")
    assert run_target(target, load_config(target, ["tracker=none", *folders])) == folder
    assert said in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    if change is None or change[0] == "run.json":  # else the claims and the picture follow the changed table
        assert {name for name in before if before[name] != after[name]} == (set() if kept else {"run.json"})
    assert (after["table.csv.bz2"] == before["table.csv.bz2"]) == (kept or change[0] == "run.json")
    if change is None:
        run_target(target, load_config(target, ["tracker=none", "progress=false", "force=true", *folders]))
        assert (folder / "run.json").read_bytes() != before["run.json"]


def test_tables_that_differ_by_more_than_rounding_are_not_judged_by_the_old_config(
    as_published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code that made them may ask for keys that the old config lacks."""
    monkeypatch.setattr(execution, "judged", lambda target, computed: pytest.fail("judged"))
    target, published_tables = all_targets()[KEY], Computed.of(as_published)
    new = {**published_tables, "table": published_tables["table"].assign(more=1.0)}
    (line,) = execution.changes_of_published(target, as_published, new, load_config(target, []))
    assert "more" in line


def test_curves_are_means_by_task_and_label(computed_of: Callable[..., Computed]) -> None:
    rows = [
        {"task": task, "optimizer": optimizer, "seed": seed, "epoch": epoch, "llc": llc}
        for task, optimizer, seed, epoch, llc in [
            ("a", "sgd", 0, 1, 1.0), ("a", "sgd", 1, 1, 3.0), ("a", "ngd", 0, 1, 5.0), ("b", "sgd", 0, 2, 7.0),
        ]
    ]  # fmt: skip
    target = Target("experiments.rank1.fig1", title="toy", curves=("table: llc, seed over epoch by optimizer",))
    (curves,) = curves_of(target, computed_of({"table": pd.DataFrame(rows)}))
    assert curves.index.name == "x/epoch"
    assert curves["curve/a/llc/sgd"].tolist() == pytest.approx([2.0, float("nan")], nan_ok=True)
    assert curves["curve/b/llc/sgd"].tolist() == pytest.approx([float("nan"), 7.0], nan_ok=True)
    assert {name for name in curves if name.endswith("/ngd")} == {"curve/a/llc/ngd", "curve/a/seed/ngd"}
    plain = Target("experiments.rank1.fig1", title="toy", curves=("table: llc over epoch",))
    (curves,) = curves_of(plain, computed_of({"table": pd.DataFrame(rows).drop(columns="task")}))
    assert curves["curve/all/llc"].tolist() == [3.0, 7.0]


def test_published_curves_have_names_that_wandb_takes() -> None:
    names = []
    for target in all_targets().values():
        folder = Path("results") / target.key / "embedded"
        if target.curves and (folder / "run.json").is_file():
            names += [name for curves in curves_of(target, Computed.of(folder)) for name in curves]
    assert len(names) > 100
    assert not [name for name in names if "*" in name]  # which W&B takes for a pattern, and refuses


# ----------------------------------------------------------------------------------------
CFG = OmegaConf.create(
    {
        "num_points": 25,
        "pbrf": {"epsilon": 1e-8},
        "branches": {"sgd": {"lr": 0.1}, "ngd": {"lr": 0.2}},
        "tasks": {"mlp_a": {"model": {"width": 3}}, "mlp_b": {"num_points": 5, "model": {"width": 3}}},
    }
)
TABLE = pd.DataFrame(
    {"task": ["mlp-a", "mlp-a", "mlp-b"], "num_steps": [150, 150, 200], "damping": 0.5, "unit": ["s", "s", ""]}
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pbrf.epsilon", 1e-8),
        ("num_points", {"mlp-a": 25, "mlp-b": 5}),
        ("model.width", 3),
        ("branches.*.lr", {"sgd": 0.1, "ngd": 0.2}),
        ("tasks", ["mlp-a", "mlp-b"]),
        ("summary.csv:num_steps", {"mlp-a": 150, "mlp-b": 200}),
        ("summary.csv:damping", 0.5),
        ("summary.csv:unit", {"mlp-a": "s", "mlp-b": ""}),
        ("pbrf.epsilom", MISSING),
    ],
)
def test_ours_is_read_from_the_config_and_the_tables(name: str, value: object) -> None:
    assert ours([name], CFG, {"summary": TABLE}) == {name: value}
    assert ours([name], CFG, {"summary": as_written(TABLE, "summary")}) == {name: value}  # or a run seems another


def test_what_was_changed_on_the_command_line_is_what_stands_beside_the_paper() -> None:
    table = pd.DataFrame({"n": [1, 2, 1]})  # without tasks: its distinct values
    assert ours(["table.csv:n"], OmegaConf.create({}), {"table": table}) == {"table.csv:n": [1, 2]}
    target = Target("experiments.toy.fig1", title="toy", paper={"pbrf.epsilon": 1e-8})
    cfg = OmegaConf.merge(CFG, {"pbrf": {"epsilon": 0.5}})
    assert settings_beside_the_paper(target, cfg, {}) == [  # type: ignore[arg-type]  # a mapping
        {"name": "tasks", "ours": ["mlp-a", "mlp-b"], "paper": ""},
        {"name": "pbrf.epsilon", "ours": 0.5, "paper": 1e-8},
    ]


CONFIG = {
    "preset": "smoke",
    "seed": 3,
    "num_points": 25,
    "llc": {"num_chains": 4, "step_size": 0.1},
    "branches": {"sgd": {"lr": 0.1}, "ngd": {"lr": 0.2}},
    "tasks": {
        "a": {"data": {"name": "digits"}},
        "b": {"num_points": 5, "llc": {"step_size": 0.2}, "branches": {"ngd": None, "exact": {"lr": 1}}},
        "gone": None,
    },
}


@pytest.mark.parametrize("config", [CONFIG, OmegaConf.create(CONFIG)], ids=["from run.json", "composed"])
def test_a_task_changes_what_stands_beside_the_tasks(config: dict) -> None:
    found = task_settings(config)
    assert list(found) == ["a", "b"]
    assert found["a"].num_points == 25
    assert found["a"].data.name == "digits"
    assert found["b"].num_points == 5
    assert found["b"].llc == {"num_chains": 4, "step_size": 0.2}
    assert found["b"].branches == {"sgd": {"lr": 0.1}, "exact": {"lr": 1}}
    assert found["a"].seed == 3
    assert "preset" not in found["a"]
    assert "tasks" not in found["a"]


def test_null_sets_a_value_and_removes_a_mapping_and_without_tasks_there_is_none() -> None:
    own = task_settings({"damping": 5.0, "extra": {"x": 1}, "tasks": {"a": {"damping": None, "extra": None}}})["a"]
    assert dict(own) == {"damping": None}
    assert task_settings({"num_seeds": 3}) == {}
    assert task_label("mlp_64_64_digits") == "mlp-64-64-digits"
