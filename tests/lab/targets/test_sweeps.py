"""Sweeps as users type them: `sweep=NAME`, a job that fails, `gather`; real processes, seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose
from PIL import Image

from curvlab.lab.runs import configuration
from curvlab.lab.tables import read_table
from curvlab.lab.targets.execution import numbers_of
from curvlab.lab.targets.target import ROOT, all_targets

NEGATIVE = (
    "Trying to create tensor with negative dimension -1: [-1]"  # a config's values are not checked as typed ones
)
SWEEPS = {path.stem: path.read_text() for path in (ROOT / "conf" / "sweep").glob("*.yaml")}


def write_sweep(toy: Path, **params: str) -> None:
    (toy / "conf" / "sweep").mkdir()
    swept = ", ".join(f'{key}: "{values}"' for key, values in params.items())
    text = f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{{swept}}}}}}}\n"
    (toy / "conf" / "sweep" / "toy.yaml").write_text(text)


def summary_of(path: Path) -> dict[str, Any]:
    """Return what W&B's own reader, `wandb leet`, finds in an offline run."""
    from wandb.util import get_core_path

    (own_file,) = path.glob("*.wandb")
    command = [get_core_path(), "leet", "inspect", "--summary", "--json", "--run-file", own_file, path.parent]
    own: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return own


def test_a_failed_job_does_not_stop_the_others_and_is_named_at_the_end(
    toy: Path, experiments: Callable[..., Any]
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

    # W&B: one run a job, read back as a user can.
    runs = [summary_of(path) for path in (toy / "outputs" / "wandb").glob("offline-run-*")]
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


@pytest.mark.parametrize("name", SWEEPS)
def test_the_keys_of_every_sweep_are_keys_of_its_target(name: str) -> None:
    target = all_targets().get(name.replace("_", "/")) or all_targets()["rank1/fisher"]
    with configuration._initialized(ROOT / "conf"):
        cfg = compose(target.config_name, [f"sweep={name}"], return_hydra_config=True)
        params = dict(cfg.hydra.sweeper.params)
        assert cfg.hydra.mode.name == "MULTIRUN"
        for key, values in params.items():
            assert key in cfg
            compose(target.config_name, [f"{key}={values.split(',')[0]}"])
