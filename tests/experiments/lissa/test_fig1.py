"""lissa-fig1 end to end at smoke scale: results, resumption, redrawing, refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import load_claims
from experiments.lissa.fig1 import TARGET
from experiments.target.execution import draw_target, judge_target

ROOT = Path(__file__).parents[3]

# Imports once, then runs the target in a child that the parent may kill: resumption, without paying for imports.
FORKING = """
import os, sys
from experiments.lissa.fig1 import TARGET
from experiments.target import load_config, run_target
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            run_target(TARGET, load_config(TARGET, line.split()))
        except BaseException as error:
            print(f"error {error!r}", flush=True)
            os._exit(1)
        print("done", flush=True)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def command(tmp_path: Path, *overrides: str) -> list[str]:
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    return [sys.executable, "-m", TARGET.package, "preset=smoke", "tracker=none", *folders, *overrides]


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/fig1")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.json"}


def test_results_are_complete_and_consistent(smoke: Path) -> None:
    images = {"figure.png", "figure_mlp-8-digits-200.png", "images_mlp-8-digits-200.png"}
    assert {path.name for path in smoke.iterdir()} == images | {
        "table.csv", "scores_mlp-8-digits-200.csv", "summary.csv", "claims.json", "run.json"
    }  # fmt: skip
    scores = pd.read_csv(smoke / "scores_mlp-8-digits-200.csv")
    assert len(scores) == 3 * 20  # points x test points
    assert [f"{value:.4g}" for value in scores.cg.dropna()] == [f"{value:.6g}" for value in scores.cg.dropna()]
    panels = pd.read_csv(smoke / "table.csv")
    assert len(panels) == 3 * 2  # points x seeds
    assert not panels.columns.str.contains("second|time").any()
    exact = panels.cg_exact_pearson.dropna()
    assert len(exact) == 2  # exact_points
    assert (exact > 0.99).all()
    assert set(panels.lissa_pbrf_case) <= {"agree", "both near zero", "apart", "overflow"}
    assert (panels.lissa_length > 0).all()
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["first-order-mlp-8-digits-200"].verdict == "reproduced"
    assert claims["overflow"].verdict == "out of reach"
    record = json.loads((smoke / "run.json").read_text())
    assert record["num_matvecs"] > 0
    assert {"name": "num_points", "ours": 3, "paper": 25} in record["settings"]
    assert str(ROOT) not in (smoke / "run.json").read_text()


def test_scores_are_what_the_library_computes(smoke: Path) -> None:
    """Independent of the target's code: LiSSA's mean over many seeds is not needed, CG's column is enough."""
    summary = pd.read_csv(smoke / "summary.csv").iloc[0]
    assert summary["damping"] == pytest.approx(5 / 270 * summary["lambda_max"], rel=1e-4)
    assert summary["step size"] == pytest.approx(1 / (summary["lambda_max"] + summary["damping"]), rel=1e-4)
    assert summary["batch size"] == np.ceil(2 * summary["tr(G)"] / summary["lambda_max"])
    assert summary["steps"] == pytest.approx(2 / (summary["step size"] * summary["damping"]), abs=1)
    assert summary["CG residual"] <= 1e-6
    assert summary["PBRF gradient norm"] <= 1e-6


def test_it_is_judged_and_drawn_again_from_the_files_alone(smoke: Path) -> None:
    before = files(smoke)
    judge_target(TARGET, smoke)
    draw_target(TARGET, smoke)
    assert files(smoke) == before


def test_second_run_computes_nothing_and_ends_with_the_same_bytes(smoke: Path, run_smoke) -> None:
    before = files(smoke)
    assert run_smoke("lissa/fig1") == smoke
    assert files(smoke) == before
    assert json.loads((smoke / "run.json").read_text())["store"]["misses"] == 0


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


def test_killed_ten_times_it_ends_with_the_table_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    overrides = {
        folder: f"preset=smoke tracker=none results.root={folder / 'results'} store.root={folder / 'store'}\n"
        for folder in (undisturbed, killed)
    }
    moments = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=one_thread(),
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None

        def start(folder: Path) -> int:
            driver.stdin.write(overrides[folder])
            driver.stdin.flush()
            return int(driver.stdout.readline())

        def finish() -> list[str]:
            lines = []
            while (line := driver.stdout.readline()) != "ended\n":
                assert line, "the process that runs the target has died"
                lines.append(line.strip())
            return lines

        start(undisturbed)
        assert "done" in finish()
        num_killed = 0
        for _ in range(10):
            child = start(killed)
            try:
                driver_wait(moments.uniform(0.05, 0.6))
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it had finished
            num_killed += "done" not in finish()
        start(killed)
        assert "done" in finish()
        driver.stdin.close()
    name = Path("results") / "lissa" / "fig1" / "smoke" / "scores_mlp-8-digits-200.csv"
    tables = [folder / name for folder in (undisturbed, killed)]
    assert num_killed >= 5  # most kills hit a run at work
    assert tables[0].read_bytes() == tables[1].read_bytes()


def driver_wait(seconds: float) -> None:
    signal.sigtimedwait([], seconds)


def test_two_processes_at_once_share_the_work(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(command(tmp_path), cwd=ROOT, env=one_thread(), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(pd.read_csv(tmp_path / "results" / "lissa" / "fig1" / "smoke" / "table.csv")) == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("preset=huge", "preset"),
        ("dampin_ratio=0.1", "damping_ratio"),
        ("data=mnits", "mnist"),
    ],
)
def test_mistyped_overrides_are_refused_with_the_nearest_name(tmp_path: Path, override: str, message: str) -> None:
    done = subprocess.run(
        command(tmp_path, override), cwd=ROOT, env=one_thread(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert override.split("=", maxsplit=1)[0] in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_data_names_file_place_and_a_way_out(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "data=cifar10", f"data.root={tmp_path / 'nothing'}"),
        cwd=ROOT,
        env={**one_thread(), "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "nothing" in done.stderr
    assert "data=digits" in done.stderr
