from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from curvlab.lab.targets.command import main
from curvlab.lab.targets.target import UnknownTargetError, all_targets, named_targets
from experiments.__main__ import main as run_command

ROOT = Path(__file__).parents[3]


def test_names_of_one_target_and_of_groups() -> None:
    assert [target.key for target in named_targets(["ngd-fig6", "ngd/fig4"])] == ["ngd/fig6", "ngd/fig4"]
    ngd = [target.key for target in named_targets(["ngd"])]
    assert ngd == sorted(ngd)
    assert set(ngd) == {key for key in all_targets() if key.startswith("ngd/")}
    figures = {target.key for target in named_targets(["figures"])}
    assert figures == {key for key in all_targets() if not key.startswith("benchmarks/")}


def test_mistyped_names_the_nearest() -> None:
    with pytest.raises(UnknownTargetError, match="no target 'ngd-fgi6'; did you mean 'ngd-fig6'"):
        named_targets(["ngd-fgi6"])


def test_help_needs_no_package_and_lists_every_target() -> None:
    # -S: no site-packages, as on a machine where nothing is installed yet.
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "experiments", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for target in all_targets().values():
        assert f"  {target.make_name} " in done.stdout
        assert target.title in done.stdout


def test_make_names_the_nearest_without_any_package() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "lisa-fig1", f"PYTHON_BASE={sys.executable} -S -E"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.startswith("error: no target 'lisa-fig1'; did you mean 'lissa-fig1'?")
    assert "Traceback" not in done.stderr


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments, f"PYTHON_BASE={sys.executable} -S -E"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_of_a_target_runs_nothing_and_a_dry_run_of_all_neither() -> None:
    assert make("help", "lissa-fig1").startswith(all_targets()["lissa/fig1"].description)
    printed = make("-n", "help", "lissa-fig1")
    assert "experiments run" not in printed
    assert "experiments help lissa-fig1" in printed
    assert "experiments run figures" in make("-n", "figures")  # printed, not run: a line with $(MAKE) would be


def test_help_of_targets_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "lissa-fig1", "ngd/fig6"]) == 0
    printed = capsys.readouterr().out
    assert [all_targets()[key].description in printed for key in ("lissa/fig1", "ngd/fig6")] == [True, True]
    assert run_command(["help", "ngd-fgi6"]) == 2
    assert "did you mean 'ngd-fig6'" in capsys.readouterr().err


def test_help_of_a_target_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from experiments.__main__ import main; main(['run', 'ngd-fig6', '--cfg', 'job'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_makefile_names_are_the_targets() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-np", "help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
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
    keys = (ROOT / "conf" / f"{target.config_name}.yaml").read_text().split("\n\n", 1)[1].strip()
    assert "#" in keys  # what they mean
    assert keys in printed
    assert all(f"\n  {preset} " in printed for preset in ("smoke", "embedded", "laptop", "paper"))
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
