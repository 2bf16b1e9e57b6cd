"""lissa-fig1 end to end at smoke scale: results, resumption, redrawing, refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import Computed, load_config
from curvlab.lab.reporting import load_claims
from curvlab.lab.targets.execution import draw_target, judge_target
from experiments.lissa.fig1 import TARGET

ROOT = Path(__file__).parents[3]

# Imports, composes and reads the code once, then runs the target in children that the parent may kill: resumption,
# without paying for that. A line holds the overrides of runs that start together; nothing is drawn, since drawing
# reads finished tables.
FORKING = """
import functools, os, sys
from experiments.lissa.fig1 import TARGET
from curvlab.lab import load_config
from curvlab.lab.targets import command, execution
command.load_libraries()
for room in ("compute", "judge"):
    TARGET.load(room)
execution.draw_target = lambda target, folder: None
composed = functools.cache(lambda overrides: load_config(TARGET, overrides.split()))
for line in sys.stdin:
    children = []
    for overrides in line.split(";"):
        cfg = composed(overrides)
        children.append(os.fork())
        if children[-1] == 0:
            try:
                execution.run_target(TARGET, cfg)
            except BaseException as error:
                print(f"error {str(error)!r}", flush=True)
                os._exit(1)
            print("done", flush=True)
            os._exit(0)
    print(children[-1], flush=True)
    for child in children:
        os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[tuple[Callable[..., int], Callable[[], list[str]]]]:
    """Give what starts runs by their overrides and returns the last process, and what waits for their words."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=one_thread() | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},  # no network
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def start(*runs: list[str]) -> int:
            process.stdin.write("; ".join(" ".join(overrides) for overrides in runs) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        def finish() -> list[str]:
            lines = []
            while (line := process.stdout.readline()) != "ended\n":
                assert line, "the process that runs the target has died"
                lines.append(line.strip())
            return [line for line in lines if line.startswith(("done", "error"))]

        yield start, finish
        process.stdin.close()


def smoke_overrides(folder: Path, *overrides: str) -> list[str]:
    folders = [f"results.root={folder / 'results'}", f"store.root={folder / 'store'}"]
    return ["preset=smoke", "tracker=none", *folders, *overrides]


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/fig1")


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(("run.", "figure"))
    }


def test_results_are_complete_and_consistent(smoke: Path) -> None:
    images = {"figure.png", "figure_mlp-8-digits-200.png", "images_mlp-8-digits-200.png"}
    assert {path.name for path in smoke.iterdir()} == images | {
        "table.csv", "scores_mlp-8-digits-200.csv", "summary.csv", "cells.csv", "larger_epsilon.csv",
        "claims.json", "run.json",
    }  # fmt: skip
    scores = pd.read_csv(smoke / "scores_mlp-8-digits-200.csv")
    assert len(scores) == 3 * 20  # points x test points
    assert [f"{value:.4g}" for value in scores.cg.dropna()] == [f"{value:.6g}" for value in scores.cg.dropna()]
    panels = pd.read_csv(smoke / "table.csv")
    assert panels.constant.value_counts().to_dict() == {
        "C = 2": 3 * 2,  # points x seeds
        "C measured": 2 * 2,
        "C = 2, by importance": 2 * 2,
    }
    assert not panels.columns.str.contains("second|time").any()
    exact = panels.cg_exact_pearson.dropna()
    assert len(exact) == 2  # exact_points
    assert (exact > 0.99).all()
    assert set(panels.lissa_pbrf_case) <= {"agree", "both near zero", "apart", "overflow"}
    assert (panels.lissa_length > 0).all()
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["self-check"].verdict == "reproduced"
    assert claims["overflow"].verdict == "out of reach"
    assert claims["cell-fitted-measured"].verdict == "out of reach"
    # One iteration to first order: LiSSA in single and SGD in double precision, on the same batches.
    assert (panels.same_batches_error < 1e-4).all()
    assert (panels.parted_step == 0).all()
    assert (panels.lissa_pbrf_error > 0.01).all()  # on others
    cells = pd.read_csv(smoke / "cells.csv")
    assert cells[["regime", "constant"]].to_numpy().tolist() == [
        ["early", "C = 2"],
        ["early", "C measured"],
        ["early", "C = 2, by importance"],
    ]
    assert claims["self-check"].value == pytest.approx(1, abs=1e-4)
    assert claims["agreement-mlp-8-digits-200"].verdict == "undecided"  # two seeds
    assert claims["pbrf-overflow"].verdict == claims["cause-mlp-8-digits-200"].verdict == "out of reach"
    assert claims["cell-early-assumed"].value == pytest.approx(cells["pearson, other batches"][0])
    record = json.loads((smoke / "run.json").read_text())
    assert record["num_matvecs"] > 0
    assert {"name": "num_points", "ours": 3, "paper": 25} in record["settings"]
    assert str(ROOT) not in (smoke / "run.json").read_text()


def test_scores_are_what_the_library_computes(smoke: Path) -> None:
    """Independent of the target's code: LiSSA's mean over many seeds is not needed, CG's column is enough."""
    summary = pd.read_csv(smoke / "summary.csv").iloc[0]
    assert summary["damping"] == pytest.approx(0.1 * summary["lambda_max"], rel=1e-4)
    assert summary["step size"] == pytest.approx(1 / (summary["lambda_max"] + summary["damping"]), rel=1e-4)
    assert summary["batch size"] == np.ceil(2 * summary["tr(G)"] / summary["lambda_max"])
    assert summary["steps"] == pytest.approx(2 / (summary["step size"] * summary["damping"]), abs=1)
    assert summary["CG residual"] <= 1e-6
    assert summary["PBRF gradient norm"] <= 1e-6


def test_damping_is_the_papers_share_of_lambda_max() -> None:
    assert load_config(TARGET).damping_ratio == pytest.approx(5 / 270, rel=1e-5)


def test_it_is_judged_and_drawn_again_from_the_files_alone(smoke: Path) -> None:
    before = files(smoke)
    judge_target(TARGET, smoke)
    draw_target(TARGET, smoke)
    assert files(smoke) == before


@pytest.mark.parametrize(("x", "y", "name"), [("lissa_0", "pbrf_1", "LiSSA"), ("cg", "exact", "influence by CG")])
def test_scatter_has_the_linear_answer_on_x_and_the_pbrf_on_y(smoke: Path, x: str, y: str, name: str) -> None:
    computed = Computed.of(smoke)
    scores = computed[f"scores_{computed['table'].task.iloc[0]}"]
    expected = scores.loc[scores.point == scores.point.iloc[0], [x, y]].to_numpy()
    axes = [ax for ax in TARGET.load("draw")(computed)["figure.png"].axes if ax.get_xlabel() == name]
    np.testing.assert_allclose(axes[0].collections[0].get_offsets(), expected)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing: the same tables give the same figures, see above."""
    monkeypatch.setattr("curvlab.lab.targets.execution.draw_target", lambda target, folder: None)


@pytest.mark.usefixtures("undrawn")
def test_second_run_computes_nothing_and_ends_with_the_same_bytes(smoke: Path, run_smoke) -> None:
    before = files(smoke)
    assert run_smoke("lissa/fig1") == smoke
    assert files(smoke) == before
    assert json.loads((smoke / "run.json").read_text())["store"]["misses"] == 0


@pytest.mark.usefixtures("undrawn")
def test_damaged_units_are_computed_again(smoke: Path, run_smoke) -> None:
    before = files(smoke)
    stored = sorted((smoke.parents[3] / "store" / "influence").rglob("*.pt"))
    assert stored
    for path in stored:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.warns(
        UserWarning, match=r"is damaged \(its checksum is wrong\); it is not used but computed again"
    ):
        run_smoke("lissa/fig1")
    assert files(smoke) == before


@pytest.mark.usefixtures("smoke")
def test_one_seed_is_refused(run_smoke) -> None:
    with pytest.raises(ValueError, match="SGD on its own batches, and with SGD on the next seed's"):
        run_smoke("lissa/fig1", "num_seeds=1")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_ten_times_it_ends_with_the_table_of_an_undisturbed_run(driver, tmp_path: Path) -> None:
    start, finish = driver
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    moments = random.Random(0)
    start(smoke_overrides(undisturbed))
    assert finish() == ["done"]
    num_killed, num_units = 0, 0
    for _ in range(10):
        child = start(smoke_overrides(killed))
        # On a machine of any speed: within a unit, soon after the one that this attempt has finished.
        while is_running(child) and len(list((killed / "store").rglob("*.pt"))) == num_units:
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, 0.1))
        if is_running(child):
            os.kill(child, signal.SIGKILL)
        num_killed += "done" not in finish()
        num_units = len(list((killed / "store").rglob("*.pt")))
    start(smoke_overrides(killed))
    assert finish() == ["done"]
    name = Path("results") / "lissa" / "fig1" / "smoke" / "scores_mlp-8-digits-200.csv"
    tables = [folder / name for folder in (undisturbed, killed)]
    assert num_killed >= 5  # most kills hit a run at work
    assert tables[0].read_bytes() == tables[1].read_bytes()


def test_two_processes_at_once_share_the_work(driver, tmp_path: Path) -> None:
    start, finish = driver
    start(smoke_overrides(tmp_path), smoke_overrides(tmp_path))
    assert finish() == ["done", "done"]
    folder = tmp_path / "results" / "lissa" / "fig1" / "smoke"
    assert len(pd.read_csv(folder / "table.csv")) == 14
    units = json.loads((folder / "run.json").read_text())["units"]
    assert sum(unit["count"] for unit in units) == len(list((tmp_path / "store").rglob("*.pt")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("preset=huge", "preset"),
        ("dampin_ratio=0.1", "damping_ratio"),
        ("data=mnits", "mnist"),
    ],
)
def test_mistyped_overrides_are_refused_with_the_nearest_name(tmp_path: Path, override: str, message: str) -> None:
    command = [sys.executable, "-m", "experiments", "run", "lissa-fig1", *smoke_overrides(tmp_path, override)]
    done = subprocess.run(command, cwd=ROOT, env=one_thread(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert override.split("=", maxsplit=1)[0] in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_data_names_file_place_and_a_way_out(driver, tmp_path: Path) -> None:
    start, finish = driver
    start(smoke_overrides(tmp_path, "data=cifar10", f"data.root={tmp_path / 'nothing'}"))
    (line,) = finish()
    assert line.startswith("error ")
    assert "nothing" in line
    assert "data=digits" in line
