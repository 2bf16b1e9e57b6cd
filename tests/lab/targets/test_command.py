"""The command line, a new target laid out, dry runs, sweeps."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from curvlab.lab import Target, all_targets, load_claims, load_config
from curvlab.lab.tables import read_table
from curvlab.lab.targets import command
from curvlab.lab.targets.command import _Schedule, run_side_by_side
from curvlab.lab.targets.execution import numbers_of
from curvlab.lab.targets.help import MINUTES, print_help
from curvlab.lab.targets.new import lay_out
from curvlab.lab.targets.plan import in_bytes, plan, sizes, stored_units
from curvlab.lab.targets.target import ROOT
from tests.warm import Warm

# --- The command line, and a new target laid out


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
    told = re.search(r"`make figures` took (\d+) minutes", (ROOT / "README.md").read_text())
    assert told is not None
    times = json.loads(MINUTES.read_text(encoding="utf-8"))
    assert 0.9 <= minutes / times["cores"] / int(told[1]) <= 2, "measure it on idle cores: results/minutes.json"
    for own in times["minutes"].values():
        if "user" in own:  # what else `time` printed
            assert own["real"] < own["user"] + own["sys"] <= times["cores"] * own["real"]
    print_help()
    assert f"`make figures` took {told[1]} minutes, measured on {times['cores']} cores" in capsys.readouterr().out


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
    failed = "  rank1-prop: FAILED (status 2; outputs/logs/rank1-prop.log)"
    for start in ("[0 of 2 done] ", "  rank1-fig1: done after ", failed):
        assert any(line.startswith(start) for line in lines)
    assert lines[-1].startswith("1 of 2 targets in ")
    assert (
        "rank1-prop failed; the end of outputs/logs/rank1-prop.log:\n  error: unknown key 'deltas'" in done.stderr
    )
    assert [path.parent.parent.name for path in tmp_path.rglob("run.json")] == ["fig1"]


def test_a_target_waits_for_those_whose_units_it_reuses() -> None:
    after = {"a": (), "b": ("toy/a",), "c": ("toy/not-chosen",)}
    first, second, other = (Target(f"experiments.toy.{name}", title=name, after=after[name]) for name in after)
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
    command.load_libraries = lambda *, tracked: None
    command.main = lambda target: wait_for(log)
    targets = [Target(f"experiments.toy.{name}", title=name) for name in "ab"]
    sys.exit(run_side_by_side(targets, []))


def shell_of_make(log: Path) -> None:
    os.environ["MAKELEVEL"], command.named_targets = "1", lambda _: run_waiting(log)
    multiprocessing.get_context("fork").Process(target=command.run, args=([],)).start()


@pytest.mark.parametrize(
    ("runs", "how", "status"),
    [(run_waiting, signal.SIGTERM, 143), (run_waiting, signal.SIGKILL, -9), (shell_of_make, signal.SIGTERM, -15)],
)
def test_targets_end_with_what_runs_them(tmp_path: Path, runs: Callable[..., None], how: int, status: int) -> None:
    parent = multiprocessing.get_context("fork").Process(target=runs, args=(log := tmp_path / "children",))
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
def test_a_target_that_is_laid_out_runs_with_all_that_others_have(
    toy: Path, experiments: Callable[..., Any], recorded_runs: Callable[[Path], list[dict[str, Any]]]
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
    (recorded,) = recorded_runs(toy / "outputs")
    numbers = recorded["summary"]
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


# --- A dry run: sizes from closed forms, published times, stored units, and nothing computed or written
MLP = {
    "data": {"_target_": "curvlab.lab.data.load_mnist", "num_train": 500},
    "model": {"_target_": "curvlab.lab.models.MLP", "hidden_sizes": [64], "activation": "tanh"},
}


def test_sizes_of_an_mlp_have_a_closed_form() -> None:
    weights = 784 * 64 + 64 * 10
    total = weights + 74
    found = sizes(MLP | {"freeze": {"normalization": False, "biases": True}})
    assert found.startswith(f"{weights:,} parameters and 74 frozen, {in_bytes(4 * total)}; ")
    assert f"holds {in_bytes(4 * (total + 3 * weights))} and" in found
    assert found.endswith(" and what a forward keeps")  # a GPU is named from 1 GB on


def test_published_language_models_are_known_without_loading_them() -> None:
    cfg = load_config(all_targets()["lissa/tab1"], ["preset=paper"])
    lines = dict(line.split(": ", 1) for line in plan(all_targets()["lissa/tab1"], cfg))
    found = {name: lines[name].partition(" ")[0] for name in lines if name.endswith("openwebtext2")}
    assert found == {
        "opt_1b_openwebtext2": "1,315,758,080",
        "llama_7b_openwebtext2": "6,738,415,616",
        "mistral_7b_openwebtext2": "7,241,732,096",
    }
    assert lines["llama_7b_openwebtext2"].endswith("2 GPUs of 80 GB")
    assert "CPU time" in lines["published, laptop"]


def test_encoder_decoders_have_a_plan() -> None:
    settings = {"data": {}, "source_length": 24, "target_length": 20, "tokenizer": {"vocabulary_size": 512}}
    t5 = {"_target_": "curvlab.lab.models.small_t5", "num_layers": 1, "width": 32, "num_heads": 2}
    tied, each_way = 512 * 32, 2 * 32 * 128 + 32 * 2  # embeddings; feed-forward and relative positions
    attention, norms = 3 * 4 * 32 * 32, (2 + 3 + 2) * 32
    assert sizes(settings | {"model": t5, "freeze": {}}).startswith(
        f"{tied + 2 * each_way + attention + norms:,} p"
    )
    assert sizes(settings | {"model": {"name": "google-t5/t5-small"}, "freeze": {}}).startswith("60,506,624 p")


def test_what_cannot_be_known_says_why() -> None:
    assert "names no data and model" in sizes({"model": None})
    assert "cannot be built" in sizes(MLP | {"data": {"_target_": "curvlab.lab.data.no_such_loader"}})
    hub = {"model": {"name": "somebody/model"}, "tokenizer": {"pretrained": "somebody/model"}, "data": {}}
    assert "somebody/model are not known without loading it" in sizes(hub)
    assert in_bytes(1.3157e12) == "1.32 TB"


def test_on_the_command_line_it_computes_nothing(tmp_path: Path) -> None:
    # In a process of its own: Hydra's logging closes what pytest captures.
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    words = ["run", "ngd-fig1", "preset=laptop", "~tasks.ffnn_1_layer_mnist_10000", "plan=true", *folders]
    command = shlex.join([sys.executable, "-m", "experiments", *words, f"hydra.run.dir={tmp_path}"])
    head = f"set -o pipefail; {command} | head -n 2"  # which reads no further
    done = subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith(
        "ngd-fig1 (laptop): a plan; nothing is computed\nffnn_2_layers_mnist_10000: 26,506"
    )
    assert done.stderr == ""
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "store").exists()


def stored(root: Path, *overrides: str) -> list[str]:
    folders = [f"results.root={root / 'nowhere'}", f"store.root={root / 'store'}"]
    target = all_targets()["rank1/prop"]
    return list(stored_units(target, load_config(target, ["preset=smoke", *folders, *overrides])))


def test_stored_units_are_found_until_one_is_not_there(smoke_result: Callable[..., Path], tmp_path: Path) -> None:
    store = smoke_result("rank1/prop").parents[3] / "store" / "rank1"
    root = shutil.copytree(store, tmp_path / "store" / "rank1").parents[1]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    (line,) = stored(root)
    assert line.endswith(" units, all there are")
    (line,) = stored(root, "seed=1")
    assert line.startswith("store: 0 units; first that is not there: rank1/")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert stored(root, "force=true") == stored(root / "nowhere") == []


# --- Sweeps as users type them: `sweep=NAME`, a job that fails, `gather`; real processes, seconds
NEGATIVE = (
    "Trying to create tensor with negative dimension -1: [-1]"  # a config's values are not checked as typed ones
)


def write_sweep(toy: Path, **params: str) -> None:
    (toy / "conf" / "sweep").mkdir()
    swept = ", ".join(f'{key}: "{values}"' for key, values in params.items())
    text = f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{{swept}}}}}}}\n"
    (toy / "conf" / "sweep" / "toy.yaml").write_text(text)


def test_a_failed_job_does_not_stop_the_others_and_is_named_at_the_end(
    toy: Path, experiments: Callable[..., Any], recorded_runs: Callable[[Path], list[dict[str, Any]]]
) -> None:
    write_sweep(toy, num_draws="5,-1", seed="0,1")
    done = experiments("run", "toy-fig1", "sweep=toy", "preset=smoke")
    assert done.returncode == 1, done.stderr
    end = done.stderr.splitlines()[-3:]
    failed = [f"  smoke num_draws=-1 seed={seed}: RuntimeError: {NEGATIVE}" for seed in range(2)]
    assert end == ["2 of the sweep's jobs failed:", *failed]
    assert "Traceback" in done.stderr
    assert "toy-fig1: " in done.stderr
    assert "(smoke num_draws=5 seed=0)" in done.stderr  # a job's first line has its overrides
    names = {path.parent.name for path in (toy / "results" / "toy" / "fig1").glob("*/run.json")}
    assert names == {f"smoke+num_draws={draws},seed={seed}" for draws in (5,) for seed in range(2)}

    # `gather`: mean and interval over seeds for each number of draws, judged.
    done = experiments("gather", "toy-fig1")
    assert done.returncode == 0, done.stderr
    folder = toy / "results" / "toy" / "fig1" / "smoke" / "sweep"
    claims = read_table(folder, "claims")
    assert set(claims.setting) == {"num_draws=5"}
    assert set(claims.runs) == {2}
    for _, row in claims.iterrows():
        runs = [
            json.loads((toy / "results/toy/fig1" / f"smoke+{row.setting},seed={seed}" / "claims.json").read_text())
            for seed in range(2)
        ]
        values = pd.Series(
            [next(c["value"] for c in run["claims"] if c["claim"]["id"] == row.claim) for run in runs]
        )
        half = 12.706204736174694 * values.std() / 2**0.5  # t of one degree of freedom, 97.5 %
        assert row[["value", "low", "high"]].tolist() == pytest.approx(
            [values.mean(), values.mean() - half, values.mean() + half], rel=1e-6, abs=1e-9
        )
        assert row.interval == "t 95 %, 2 seeds"
    assert Image.open(folder / "figure.png").width > 300
    assert "2 variations; claims: " in done.stdout
    assert (claims.explanation[claims.verdict != "reproduced"].str.len() > 10).all()
    assert ("(why: claims.csv)" in done.stdout) == (claims.verdict == "not asked here").any()

    # W&B: one run a job, read back as a user can.
    runs = recorded_runs(toy / "outputs")
    assert len(runs) == 4
    assert len({run["tags"][-1] for run in runs}) == 1  # the sweep
    assert runs[0]["tags"][-1].startswith("sweep-")
    assert {run["state"] for run in runs if "num_draws=-1" in run["tags"]} == {"failed"}
    assert {run["summary"]["error"] for run in runs if "num_draws=-1" in run["tags"]} == {
        f"RuntimeError: {NEGATIVE}"
    }
    good = {run["name"]: run for run in runs if "num_draws=5" in run["tags"]}
    assert set(good) == {f"toy-fig1 smoke+num_draws=5,seed={seed}" for seed in range(2)}
    for seed in range(2):
        run = good[f"toy-fig1 smoke+num_draws=5,seed={seed}"]
        assert (run["state"], run["config"]["seed"], run["tags"][0]) == ("finished", seed, "smoke")
        assert f"seed={seed}" in run["tags"]
        folder = toy / "results" / "toy" / "fig1" / f"smoke+num_draws=5,seed={seed}"
        logged = {
            key: value for key, value in run["summary"].items() if not isinstance(value, dict) and key[0] != "_"
        }
        units = json.loads((folder / "run.json").read_text())["num_units"]
        assert logged.pop("progress/units") == units
        assert logged.pop("progress/seconds") > 0
        numbers = {key: "NaN" if value != value else value for key, value in numbers_of(folder).items()}
        assert logged == pytest.approx(numbers)
        assert set(run["summary"]) >= {"table", "figure"}


def test_a_mistyped_sweep_is_refused(toy: Path, experiments: Callable[..., Any]) -> None:
    write_sweep(toy, seed="0,1")
    done = experiments("run", "toy-fig1", "sweep=tyo", "preset=smoke")
    assert done.returncode == 2
    assert "unknown choice 'tyo' for 'sweep'; did you mean 'toy'?" in done.stderr
